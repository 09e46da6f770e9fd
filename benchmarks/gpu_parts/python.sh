# Chooses the Python of `make gpu`; sourced by the Makefile, from the folder that it lies in. Sets `python`, and PYTHONPATH.
#
#   .venv's            where its torch has CUDA, or no other's has: `make` sets it up
#   the machine's own  ($PYTHON) where its torch has CUDA: nothing is installed into it; what it lacks goes to .site, out
#                      of .whl if wheels lie there (for a machine that no network reaches)

has_cuda() { "$1" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; }

lacks() { "$1" - <<'PYTHON_END'
from importlib.util import find_spec
needed = {"numpy": "numpy", "networkx": "networkx", "pydantic": "pydantic", "yaml": "PyYAML", "typer": "typer", "rich": "rich",
          "safetensors": "safetensors", "hypothesis": "hypothesis", "pytest": "pytest", "pytest_timeout": "pytest-timeout"}
print(*(package for module, package in needed.items() if find_spec(module) is None))
PYTHON_END
}

export PYTHONPATH="$PWD:$PWD/.site${PYTHONPATH:+:$PYTHONPATH}"
python=.venv/bin/python
if ! has_cuda "$python" && has_cuda "$PYTHON"; then
  python=$PYTHON
  if [ -n "$(lacks "$python")" ]; then
    if compgen -G '.whl/*.whl' >/dev/null; then
      "$python" -m pip install --quiet --no-index --no-deps --upgrade --target .site .whl/*.whl
    else
      "$python" -m pip install --quiet --disable-pip-version-check --upgrade --target .site $(lacks "$python")
    fi
  fi
  missing=$(lacks "$python")
  [ -z "$missing" ] || { echo "$python lacks $missing; put their wheels, and those they need, into .whl/" >&2; exit 1; }
else
  "$MAKE" --no-print-directory .venv/.installed
fi
echo "$("$python" -c 'import sys, torch; print(sys.executable, "with torch", torch.__version__)')"
