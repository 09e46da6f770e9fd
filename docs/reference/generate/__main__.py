"""Write all pages of the reference: `make reference`."""

from .pages import FOLDER, pages

for name, text in pages().items():
    (FOLDER / name).write_text(text, encoding="utf-8")
