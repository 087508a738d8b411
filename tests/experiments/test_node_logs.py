"""The log of a trial on several nodes."""

from __future__ import annotations

from pathlib import Path

from det_lightning.experiments.node_logs import copy_node_logs


def test_lines_of_all_nodes_are_copied_once(tmp_path: Path) -> None:
    logs = [tmp_path / "nodes" / str(rank) / "log.txt" for rank in range(2)]
    for log in logs:
        log.parent.mkdir(parents=True)
    logs[0].write_text("begins\n[rank=1] trains\nno end")
    copy_node_logs(tmp_path, ended=False)
    logs[1].write_text("\n\rhalf\n")
    for _ in range(2):
        copy_node_logs(tmp_path, ended=False)
    with logs[0].open("a") as file:
        file.write(" yet")
    for _ in range(2):
        copy_node_logs(tmp_path, ended=True)
    assert (tmp_path / "log.txt").read_bytes() == (
        b"[node=0] begins\n[rank=1] trains\n[node=1] \n[node=1] \rhalf\n[node=0] no end yet\n"
    )


def test_trial_on_one_node_has_nothing_to_copy(tmp_path: Path) -> None:
    copy_node_logs(tmp_path, ended=True)
    assert list(tmp_path.iterdir()) == []
