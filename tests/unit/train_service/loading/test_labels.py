from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from shared.errors import InvalidArgument
from train_service.domain.spec import CLASSIFICATION
from train_service.loading.loader import labels_of


@pytest.mark.parametrize("labels", [[0, 5, 1, 7], [2, -1, 0, 3]])
def test_of_several_labels_that_are_no_class_the_first_is_named(labels: list[int]) -> None:
    row_ids = np.asarray([10, 11, 12, 13], np.int64)
    with pytest.raises(InvalidArgument, match=rf"^row 11 has the label {labels[1]} in column 'digit'"):
        labels_of(pa.table({"digit": labels}), "digit", row_ids, 3, CLASSIFICATION)
