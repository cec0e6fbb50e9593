"""Pages that need no network: the templates in this folder, filled in."""

from __future__ import annotations

from importlib.resources import files
from typing import Any


def page(name: str, style: str = "", **values: Any) -> str:
    """Return `NAME.html` with these values, `NAME.css` and more style; text is escaped, Markup is taken as it is."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader(__name__, ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    css = (files(__name__) / f"{name}.css").read_text(encoding="utf-8")
    return environment.get_template(f"{name}.html").render(style=Markup(f"{style}\n{css}"), **values) + "\n"
