"""Pages that need no network: a template and a style of a package, on the frame and the style that all pages share."""

from __future__ import annotations

from importlib.resources import files
from typing import Any


def page(package: str, name: str, style: str = "", **values: Any) -> str:
    """Return `web/NAME.html` of a package, filled in, with `web/NAME.css`, the shared style and more `style`.

    Text is escaped, Markup is taken as it is.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "web"), PackageLoader(__name__, "")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    shared, own = files(__name__) / "base.css", files(package) / "web" / f"{name}.css"
    styles = [style, *(file.read_text(encoding="utf-8") for file in (shared, own))]
    return environment.get_template(f"{name}.html").render(style=Markup("\n".join(styles)), **values) + "\n"
