"""Doctor: what is wrong with a file of rollouts, found before anyone trains on it or trusts it.

`diagnose` streams a file of records and returns a `Diagnosis`: faults and notes, each a `Finding`
with a count, an example and what to do.
"""

from tokencredit.doctor.diagnosis import diagnose
from tokencredit.doctor.report import Diagnosis, Finding, Place

__all__ = ["Diagnosis", "Finding", "Place", "diagnose"]
