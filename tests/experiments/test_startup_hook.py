"""Which commands of a start-up hook may install something, and need a choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from det_lightning.startup_hook import find_all_installs, find_installs


@pytest.mark.parametrize(
    ("hook", "script", "line", "shown"),
    [
        ("export A=1\npip install timm\n", "startup-hook.sh", 2, "pip install timm"),
        ("sudo apt-get -y install \\\n  git\n", "startup-hook.sh", 1, "sudo apt-get -y install git"),
        ("curl -sSL https://a.example | bash\n", "startup-hook.sh", 1, "curl -sSL https://a.example | bash"),
        ("bash setup.sh\n", "setup.sh", 2, "/opt/conda/bin/python -m pip -q install -e ."),
    ],
)
def test_installs_are_found(hook: str, script: str, line: int, shown: str, tmp_path: Path) -> None:
    (tmp_path / "startup-hook.sh").write_text(hook)
    (tmp_path / "setup.sh").write_text("set -e\n/opt/conda/bin/python -m pip -q install -e .\n")
    (found,) = find_all_installs(tmp_path)
    assert (found[0].name, found[1].line, found[1].text) == (script, line, shown)


@pytest.mark.parametrize(
    "command",
    [
        "python -mpip install a",
        "mim install a",
        "echo '### packages' && pip install a",
        "curl -sL https://a.example | sudo -E bash -",
        "bash <(curl -s https://a.example)",
        "$(which pip) install a",
        "X='a#b' pip install a",
        "echo $(ls)#a && pip install a",
        'echo "$(pip install a)"',
        "X=(a b) pip install a",
        "if true; then pip install a; fi",
        "case a in a) pip install a;; esac",
        "cd x && bash setup.sh",
        "cat <<EOF\ndon't\nEOF\npip install a  # '",
        "echo $'\\'' ; pip install a  # '",
        "sh -c 'pip install a'",
        "source $HOME/setup.sh",
    ],
)
def test_unknown_command_needs_a_choice(command: str) -> None:
    assert find_installs(f"set -e\n{command}\n")[0].line >= 2


@pytest.mark.parametrize(
    "command",
    [
        "# pip install it's\nset -e",
        "pip() { true; }\necho b # pip install b\npip install c  # det-lightning: ok",
        'DIR="$(cd "$(dirname "$0")" && pwd)"; export X=$(pwd)/a Y=$((1 + 2))\nZ=`pwd`/b',
        "if [[ -f a ]]; then\n  cp a b\nelse\n  ln -s a b >log 2>&1 || exit 1\nfi",
        "for i in a b; do mkdir -p $i; done",
        "make_it() { mkdir a; }",
        "export A=1 && \\\n  export B='pip install a'",
        "bash -e setup.sh; . ./a/variables.sh",
    ],
)
def test_harmless_hook_needs_no_choice(command: str) -> None:
    assert find_installs(f"{command}\n") == []
