"""After a run: the largest deviation from the official codes, by group of files."""


def pytest_terminal_summary(terminalreporter):
    groups = {}
    for report in terminalreporter.getreports("passed"):
        for group, deviation in (value for name, value in report.user_properties if name == "parity"):
            groups.setdefault(group, []).append(deviation)
    for group, deviations in sorted(groups.items()):
        terminalreporter.write_line(
            f"parity {group}: {len(deviations)} files, largest deviation {max(deviations):.1e} of the largest entry"
        )
