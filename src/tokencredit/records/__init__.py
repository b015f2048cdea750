"""Records: rollouts and their credit as JSON Lines, read and written as a stream.

One response a line. `read_records` and `read_groups` read, `RecordWriter` writes a file that
is whole or not there, `append_records` adds a step to a running one, and `assign_file` gives
credit to a whole file.

Example:
    >>> import pathlib, tempfile
    >>> from tokencredit.records import Record, RecordWriter, read_records
    >>> folder = tempfile.TemporaryDirectory()
    >>> path = pathlib.Path(folder.name) / "rollouts.jsonl.gz"
    >>> record = Record(group="p1", tokens=["4", "2"], mask=[1, 1], reward=1.0)
    >>> with RecordWriter(path) as writer:
    ...     writer.write(record)
    >>> list(read_records(path)) == [record]
    True
    >>> folder.cleanup()
"""

from tokencredit.records.assigning import AssignProgress, AssignSummary, assign_file
from tokencredit.records.reading import read_groups, read_records
from tokencredit.records.schema import (
    SCHEMA,
    CreditRecord,
    Record,
    RecordError,
    parse_record,
    to_json,
)
from tokencredit.records.tensors import (
    compact,
    records_from_rollouts,
    records_with_credit,
    rollouts_from_records,
)
from tokencredit.records.token_texts import token_texts
from tokencredit.records.writing import RecordWriter, append_records, truncate_after_step

__all__ = [
    "SCHEMA",
    "AssignProgress",
    "AssignSummary",
    "CreditRecord",
    "Record",
    "RecordError",
    "RecordWriter",
    "append_records",
    "assign_file",
    "compact",
    "parse_record",
    "read_groups",
    "read_records",
    "records_from_rollouts",
    "records_with_credit",
    "rollouts_from_records",
    "to_json",
    "token_texts",
    "truncate_after_step",
]
