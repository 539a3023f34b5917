"""The statistics of a split's values, independent of the order in which they were seen."""

from data_service.domain.statistics.columns import SplitStatistics
from data_service.domain.statistics.result import (
    ColumnStatistics,
    NumberStatistics,
    TextStatistics,
    TimeStatistics,
)

__all__ = ["ColumnStatistics", "NumberStatistics", "SplitStatistics", "TextStatistics", "TimeStatistics"]
