"""What is known of the values of a split, whatever the order in which they were seen."""

from data_service.domain.statistics.result import (
    ColumnStatistics,
    NumberStatistics,
    TextStatistics,
    TimeStatistics,
)
from data_service.domain.statistics.split import SplitStatistics

__all__ = ["ColumnStatistics", "NumberStatistics", "SplitStatistics", "TextStatistics", "TimeStatistics"]
