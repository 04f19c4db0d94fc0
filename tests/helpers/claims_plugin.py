"""Fail a full run of the tests if CLAIMS.md is stale; `pytest --write-claims` writes it.

`@pytest.mark.claim("S3")` marks a test of claim S3, and note("S3", draws=80) records what the files
in lab/claims/ call {S3.draws}.
"""

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--write-claims",
        action="store_true",
        help="write CLAIMS.md; needs a run of all tests",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "claim(*ids): the numbered claims of papers that this test checks"
    )
    # in the process that gets the reports, not in xdist's workers
    if not hasattr(config, "workerinput"):
        if config.option.write_claims and not is_whole(config):
            raise pytest.UsageError(
                "--write-claims needs a run of all tests, without names, -k or -m"
            )
        config.pluginmanager.register(Claims(config))


def is_whole(config) -> bool:
    """Return whether the command line leaves no test out."""
    fewer = (
        "keyword",
        "markexpr",
        "deselect",
        "ignore",
        "ignore_glob",
        "collectonly",
        "lf",
    )
    return config.args == config.getini("testpaths") and not any(
        getattr(config.option, name, False) for name in fewer
    )


def pytest_collection_modifyitems(items):
    for item in items:  # properties are sent with the reports
        item.user_properties += [
            ("claim", x) for mark in item.iter_markers("claim") for x in mark.args
        ]


@pytest.fixture
def note(record_property):
    def noted(claim, **values):
        for name, x in values.items():  # numbers of numpy and torch cannot be sent
            record_property(f"{claim}.{name}", x.item() if hasattr(x, "item") else x)

    return noted


class Claims:
    """The values and claims that the tests of this run recorded."""

    def __init__(self, config):
        self.config, self.recorded = config, []

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.recorded += [
                (report.nodeid, name, value) for name, value in report.user_properties
            ]

    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus == pytest.ExitCode.OK and is_whole(self.config):
            from claims_page import write_or_compare

            try:
                message = write_or_compare(
                    self.recorded, self.config.option.write_claims
                )
            except ValueError as error:
                message, session.exitstatus = (
                    f"error: {error}",
                    pytest.ExitCode.TESTS_FAILED,
                )
            self.config.get_terminal_writer().line(f"\n{message}")
