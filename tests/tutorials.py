"""Tutorials as tests run them: the fenced blocks of a page in order, and the comparison of outputs with what is shown.

a block that begins with    is
`# name.py`, `# name.yaml`  a file, written to the folder in which the page runs
`$ command`                 a session: its commands are run in one shell, and print what is shown below each
`--- a` (diff)              the difference of two files, which have to differ so
anything else               an excerpt, in ```text alone: it is not run
"""

import contextlib
import difflib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"

MEASURED = (
    r"[\d.,e+]+(?= samples/s)",
    r"[\d.,e+]+(?= tokens/s)",
    r"(?<=MFU )[\d.]+%",
    r"[\d.]+(?= GB  bubble)",
    r"(?<=  bubble )[\d.]+%(?=  left)",
    r"(?<=, bubble )[\d.]+%(?= \(planned)",
    r"(?<=  left )[\d:.]+ (?:s|min|h)",
    r"(?<= steps in )[\d:.]+ (?:s|min|h)",
    r"(?<=since )[\d.]+(?= s)",
    r"(?<=\(host )[^,)]+",
    r"(?<=_hooks\[)\d+",
    r"(?<= passed in )[\d.]+(?=s)",
    r"(?<=  run )[0-9a-f]{16}",
    r"[\d.]+(?= MB  whole)",
)
"""Parts of an output that depend on the machine."""
FLOAT = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e-?\d+)?")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language and text."""

    language: str
    text: str

    @property
    def file_name(self) -> str | None:
        """Return the name of the file that the block is, if it is one."""
        named = re.match(r"# ([\w-]+\.(?:py|yaml))\n", self.text)
        return named and named[1]


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [Block(language, text) for language, text in found]


def write_files(page: Path, folder: Path) -> list[str]:
    """Write the files of a page to a folder, and return their names."""
    files = {block.file_name: block.text for block in blocks(page) if block.file_name}
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(files)


def run_page(page: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Run the blocks of a page in a folder, in order; yield each one's text as shown and as it is.

    The folder is as empty as a reader's, but for the `examples` of a page whose commands name them.
    """
    if re.search(r"^\$ .* examples/", page.read_text(encoding="utf-8"), re.MULTILINE):
        (folder / "examples").symlink_to(ROOT / "examples")
    for block in blocks(page):
        if block.file_name:
            (folder / block.file_name).write_text(block.text, encoding="utf-8")
        elif block.text.startswith("$ "):
            yield block.text, run_session(block.text, folder)
        elif block.language == "diff":
            yield block.text, differences(block.text, folder)
        else:
            assert block.language == "text", f"{page.name}: not run: {block.text}"


def run_session(session: str, folder: Path, prelude: str = "", scripts: Path | None = None) -> str:
    """Run the commands of a session in one shell, and return the session with what they print, but of slow starts.

    They come from `scripts`, of an environment that has the package installed; None: from this one, on the checkout.
    """
    script = [prelude, "code=0"]
    for command in re.findall(r"^\$ ((?:.*\\\n)*.*)$", session, re.MULTILINE):
        script += [f"printf '$ %s\\n' {shlex.quote(command)}", "(exit $code)", command, "code=$?"]
    path = f"{scripts or sysconfig.get_path('scripts')}:{os.environ['PATH']}"
    python_path = "" if scripts else os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=unmeasured(folder) | {"PATH": path, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    return re.sub("^… .*\n", "", done.stdout, flags=re.MULTILINE)


def unmeasured(folder: Path) -> dict[str, str]:
    """Return an environment where `calibrate` has not measured this machine, so that no step shows its MFU."""
    fonts = os.environ.get("MPLCONFIGDIR", os.path.expanduser("~/.cache/matplotlib"))  # found once, for all
    return os.environ | {"XDG_CACHE_HOME": str(folder.resolve() / ".cache"), "MPLCONFIGDIR": fonts}


@contextlib.contextmanager
def command_server(folder: Path) -> Iterator[str]:
    """Serve the command `quintsched` from one process that forks; yield what has the shell of a session ask it."""
    pipes = [folder / name for name in ("request", "reply")]
    for pipe in pipes:
        os.mkfifo(pipe)
    with contextlib.ExitStack() as open_pipes:  # held open here, nobody waits for an end that has died
        for pipe in pipes:
            open_pipes.callback(os.close, os.open(pipe, os.O_RDWR))
        server = subprocess.Popen([sys.executable, "-c", SERVER, folder], cwd=ROOT, env=unmeasured(folder))
        try:
            yield SERVED.format(folder=shlex.quote(str(folder)))
        finally:
            server.terminate()
            server.wait()


SERVER = """
import contextlib, gc, io, os, sys
from importlib import import_module
from pathlib import Path
from quintsched.cli import main
for path in Path("quintsched").rglob("*.py"):
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    if path.parts[1] not in ("runtime", "viz") and path.name != "__main__.py":
        import_module(module)
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["schedules"])
gc.freeze()
os.chdir(sys.argv[1])
for line in open("request"):
    folder, *arguments = line.split("\\0")[:-1]
    if not (child := os.fork()):
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        os.chdir(folder)
        sys.argv = ["quintsched", *arguments]
        main()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open("reply", "w") as reply:
        reply.write(f"{code}\\n")
"""
"""A process that has the planner imported and the command line built, and runs each command that it reads in a child.

What it holds then is frozen: a child that ends would otherwise look through all of it, and copy its pages, for a
quarter of a second.
"""
SERVED = """
quintsched() {{
    local code=1 at={folder}
    {{ printf '%s\\0' "$PWD" "$@"; echo; }} > $at/request
    read -t 120 code < $at/reply; cat $at/out; cat $at/err >&2; return $code
}}
"""


def differences(shown: str, folder: Path) -> str:
    """Return how two files differ, in the form of a block that names them in its first two lines."""
    old, new = re.findall(r"^(?:---|\+\+\+) (\S+)$", shown, re.MULTILINE)[:2]
    texts = [(folder / name).read_text(encoding="utf-8").splitlines()[1:] for name in (old, new)]
    lines = list(difflib.unified_diff(*texts, n=1, lineterm=""))[2:]
    return "\n".join([f"--- {old}", f"+++ {new}", *(line for line in lines if not line.startswith("@@"))]) + "\n"


def is_like(shown: str, printed: str, tolerance: float = 0.0) -> bool:
    """Return whether an output is what is shown, but for parts that depend on the machine and rounding of floats."""
    for pattern in MEASURED:
        shown, printed = (re.sub(pattern, "…", text) for text in (shown, printed))
    numbers = [[float(number) for number in FLOAT.findall(text)] for text in (shown, printed)]
    if tolerance == 0 or len(numbers[0]) != len(numbers[1]):
        return shown == printed
    is_near = all(abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in zip(*numbers, strict=True))
    return is_near and FLOAT.sub("…", shown) == FLOAT.sub("…", printed)


def filled_in(page: Path, folder: Path) -> str:
    """Return the text of a page with the outputs that its sessions print here."""
    text = page.read_text(encoding="utf-8")
    for shown, printed in run_page(page, folder):
        text = text.replace(f"\n{shown}```", f"\n{printed}```", 1)
    return text


if __name__ == "__main__":  # python tests/tutorials.py PAGE FOLDER: writes what the page's sessions print into it
    written = filled_in(Path(sys.argv[1]), Path(sys.argv[2]))
    Path(sys.argv[1]).write_text(written, encoding="utf-8")
