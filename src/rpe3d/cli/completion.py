"""`rpe3d completion`: print a script that lets a shell complete verbs and their options.

eval "$(rpe3d completion bash)"                                    # in ~/.bashrc; zsh likewise
rpe3d completion fish > ~/.config/fish/completions/rpe3d.fish
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from importlib import import_module

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="shell to print a script for")
    parser.epilog = 'bash and zsh: eval "$(rpe3d completion bash)"; fish: rpe3d completion fish | source'


def run(arguments: Namespace) -> int:
    print(fish() if arguments.shell == "fish" else bash(zsh=arguments.shell == "zsh"))
    return 0


def options() -> dict[str, list[str]]:
    """Return the options and fixed words of every verb."""
    from rpe3d.cli import VERBS, Parser

    found = {}
    for verb, (module, _) in VERBS.items():
        parser = Parser(prog=verb)
        import_module(module).add_arguments(parser)
        words = [
            str(choice) for action in parser._actions if not action.option_strings for choice in action.choices or ()
        ]
        flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        found[verb] = [*words, *flags]
    return found


def bash(*, zsh: bool = False) -> str:
    """Return a bash function, which zsh runs through bashcompinit. Words that are not options complete as files."""
    known = options()
    cases = "\n".join(f'    {verb}) words="{" ".join(words)}" ;;' for verb, words in known.items())
    first = "autoload -Uz bashcompinit && bashcompinit\n" if zsh else ""
    return f"""{first}_rpe3d() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(known)} --help --version"; fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _rpe3d rpe3d"""


def fish() -> str:
    """Return declarations for fish, with the one-line description of each verb."""
    from rpe3d.cli import VERBS

    lines = []
    for verb, words in options().items():
        told = VERBS[verb][1].replace("'", "\\'")
        lines.append(f"complete -c rpe3d -n __fish_use_subcommand -f -a {verb} -d '{told}'")
        for word in words:
            how = f"-l {word[2:]}" if word.startswith("--") else f"-f -a {word}"
            lines.append(f"complete -c rpe3d -n '__fish_seen_subcommand_from {verb}' {how}")
    return "\n".join(lines)
