from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UnknownValue(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNKNOWN_VALUE_UNSPECIFIED: _ClassVar[UnknownValue]
    UNKNOWN_VALUE_ERROR: _ClassVar[UnknownValue]
    UNKNOWN_VALUE_ENCODE: _ClassVar[UnknownValue]
UNKNOWN_VALUE_UNSPECIFIED: UnknownValue
UNKNOWN_VALUE_ERROR: UnknownValue
UNKNOWN_VALUE_ENCODE: UnknownValue

class Transform(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedCompositeFieldContainer[TransformStep]
    def __init__(self, steps: _Optional[_Iterable[_Union[TransformStep, _Mapping]]] = ...) -> None: ...

class TransformStep(_message.Message):
    __slots__ = ("column", "to_float", "normalize", "select", "drop", "rename", "cast", "filter", "fill_nulls", "standardize", "min_max_scale", "ordinal_encode", "one_hot_encode", "bucketize", "concat", "decode_image", "resize", "center_crop", "grayscale", "random_crop", "random_flip", "random_rotation", "color_jitter", "custom", "tokenize")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    TO_FLOAT_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    SELECT_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    RENAME_FIELD_NUMBER: _ClassVar[int]
    CAST_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    FILL_NULLS_FIELD_NUMBER: _ClassVar[int]
    STANDARDIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_MAX_SCALE_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_ENCODE_FIELD_NUMBER: _ClassVar[int]
    ONE_HOT_ENCODE_FIELD_NUMBER: _ClassVar[int]
    BUCKETIZE_FIELD_NUMBER: _ClassVar[int]
    CONCAT_FIELD_NUMBER: _ClassVar[int]
    DECODE_IMAGE_FIELD_NUMBER: _ClassVar[int]
    RESIZE_FIELD_NUMBER: _ClassVar[int]
    CENTER_CROP_FIELD_NUMBER: _ClassVar[int]
    GRAYSCALE_FIELD_NUMBER: _ClassVar[int]
    RANDOM_CROP_FIELD_NUMBER: _ClassVar[int]
    RANDOM_FLIP_FIELD_NUMBER: _ClassVar[int]
    RANDOM_ROTATION_FIELD_NUMBER: _ClassVar[int]
    COLOR_JITTER_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_FIELD_NUMBER: _ClassVar[int]
    column: str
    to_float: ToFloat
    normalize: Normalize
    select: Select
    drop: Drop
    rename: Rename
    cast: Cast
    filter: Filter
    fill_nulls: FillNulls
    standardize: Standardize
    min_max_scale: MinMaxScale
    ordinal_encode: OrdinalEncode
    one_hot_encode: OneHotEncode
    bucketize: Bucketize
    concat: Concat
    decode_image: DecodeImage
    resize: Resize
    center_crop: CenterCrop
    grayscale: Grayscale
    random_crop: RandomCrop
    random_flip: RandomFlip
    random_rotation: RandomRotation
    color_jitter: ColorJitter
    custom: Custom
    tokenize: Tokenize
    def __init__(self, column: _Optional[str] = ..., to_float: _Optional[_Union[ToFloat, _Mapping]] = ..., normalize: _Optional[_Union[Normalize, _Mapping]] = ..., select: _Optional[_Union[Select, _Mapping]] = ..., drop: _Optional[_Union[Drop, _Mapping]] = ..., rename: _Optional[_Union[Rename, _Mapping]] = ..., cast: _Optional[_Union[Cast, _Mapping]] = ..., filter: _Optional[_Union[Filter, _Mapping]] = ..., fill_nulls: _Optional[_Union[FillNulls, _Mapping]] = ..., standardize: _Optional[_Union[Standardize, _Mapping]] = ..., min_max_scale: _Optional[_Union[MinMaxScale, _Mapping]] = ..., ordinal_encode: _Optional[_Union[OrdinalEncode, _Mapping]] = ..., one_hot_encode: _Optional[_Union[OneHotEncode, _Mapping]] = ..., bucketize: _Optional[_Union[Bucketize, _Mapping]] = ..., concat: _Optional[_Union[Concat, _Mapping]] = ..., decode_image: _Optional[_Union[DecodeImage, _Mapping]] = ..., resize: _Optional[_Union[Resize, _Mapping]] = ..., center_crop: _Optional[_Union[CenterCrop, _Mapping]] = ..., grayscale: _Optional[_Union[Grayscale, _Mapping]] = ..., random_crop: _Optional[_Union[RandomCrop, _Mapping]] = ..., random_flip: _Optional[_Union[RandomFlip, _Mapping]] = ..., random_rotation: _Optional[_Union[RandomRotation, _Mapping]] = ..., color_jitter: _Optional[_Union[ColorJitter, _Mapping]] = ..., custom: _Optional[_Union[Custom, _Mapping]] = ..., tokenize: _Optional[_Union[Tokenize, _Mapping]] = ...) -> None: ...

class ToFloat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Normalize(_message.Message):
    __slots__ = ("mean", "std")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    STD_FIELD_NUMBER: _ClassVar[int]
    mean: _containers.RepeatedScalarFieldContainer[float]
    std: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, mean: _Optional[_Iterable[float]] = ..., std: _Optional[_Iterable[float]] = ...) -> None: ...

class Select(_message.Message):
    __slots__ = ("columns",)
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, columns: _Optional[_Iterable[str]] = ...) -> None: ...

class Drop(_message.Message):
    __slots__ = ("columns",)
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, columns: _Optional[_Iterable[str]] = ...) -> None: ...

class Rename(_message.Message):
    __slots__ = ("columns",)
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.ScalarMap[str, str]
    def __init__(self, columns: _Optional[_Mapping[str, str]] = ...) -> None: ...

class Cast(_message.Message):
    __slots__ = ("arrow_type",)
    ARROW_TYPE_FIELD_NUMBER: _ClassVar[int]
    arrow_type: str
    def __init__(self, arrow_type: _Optional[str] = ...) -> None: ...

class Filter(_message.Message):
    __slots__ = ("expression",)
    EXPRESSION_FIELD_NUMBER: _ClassVar[int]
    expression: str
    def __init__(self, expression: _Optional[str] = ...) -> None: ...

class FillNulls(_message.Message):
    __slots__ = ("value", "statistic")
    class Statistic(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATISTIC_UNSPECIFIED: _ClassVar[FillNulls.Statistic]
        STATISTIC_MEAN: _ClassVar[FillNulls.Statistic]
        STATISTIC_MEDIAN: _ClassVar[FillNulls.Statistic]
        STATISTIC_MODE: _ClassVar[FillNulls.Statistic]
    STATISTIC_UNSPECIFIED: FillNulls.Statistic
    STATISTIC_MEAN: FillNulls.Statistic
    STATISTIC_MEDIAN: FillNulls.Statistic
    STATISTIC_MODE: FillNulls.Statistic
    VALUE_FIELD_NUMBER: _ClassVar[int]
    STATISTIC_FIELD_NUMBER: _ClassVar[int]
    value: Scalar
    statistic: FillNulls.Statistic
    def __init__(self, value: _Optional[_Union[Scalar, _Mapping]] = ..., statistic: _Optional[_Union[FillNulls.Statistic, str]] = ...) -> None: ...

class Standardize(_message.Message):
    __slots__ = ("mean", "deviation")
    MEAN_FIELD_NUMBER: _ClassVar[int]
    DEVIATION_FIELD_NUMBER: _ClassVar[int]
    mean: float
    deviation: float
    def __init__(self, mean: _Optional[float] = ..., deviation: _Optional[float] = ...) -> None: ...

class MinMaxScale(_message.Message):
    __slots__ = ("min", "max", "clip")
    MIN_FIELD_NUMBER: _ClassVar[int]
    MAX_FIELD_NUMBER: _ClassVar[int]
    CLIP_FIELD_NUMBER: _ClassVar[int]
    min: float
    max: float
    clip: bool
    def __init__(self, min: _Optional[float] = ..., max: _Optional[float] = ..., clip: _Optional[bool] = ...) -> None: ...

class OrdinalEncode(_message.Message):
    __slots__ = ("categories", "unknown")
    CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    categories: _containers.RepeatedScalarFieldContainer[str]
    unknown: UnknownValue
    def __init__(self, categories: _Optional[_Iterable[str]] = ..., unknown: _Optional[_Union[UnknownValue, str]] = ...) -> None: ...

class OneHotEncode(_message.Message):
    __slots__ = ("categories", "unknown")
    CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    categories: _containers.RepeatedScalarFieldContainer[str]
    unknown: UnknownValue
    def __init__(self, categories: _Optional[_Iterable[str]] = ..., unknown: _Optional[_Union[UnknownValue, str]] = ...) -> None: ...

class Bucketize(_message.Message):
    __slots__ = ("boundaries",)
    BOUNDARIES_FIELD_NUMBER: _ClassVar[int]
    boundaries: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, boundaries: _Optional[_Iterable[float]] = ...) -> None: ...

class Concat(_message.Message):
    __slots__ = ("columns", "into", "keep")
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    INTO_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    columns: _containers.RepeatedScalarFieldContainer[str]
    into: str
    keep: bool
    def __init__(self, columns: _Optional[_Iterable[str]] = ..., into: _Optional[str] = ..., keep: _Optional[bool] = ...) -> None: ...

class DecodeImage(_message.Message):
    __slots__ = ("mode",)
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        MODE_UNSPECIFIED: _ClassVar[DecodeImage.Mode]
        MODE_RGB: _ClassVar[DecodeImage.Mode]
        MODE_GRAY: _ClassVar[DecodeImage.Mode]
    MODE_UNSPECIFIED: DecodeImage.Mode
    MODE_RGB: DecodeImage.Mode
    MODE_GRAY: DecodeImage.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: DecodeImage.Mode
    def __init__(self, mode: _Optional[_Union[DecodeImage.Mode, str]] = ...) -> None: ...

class Resize(_message.Message):
    __slots__ = ("height", "width", "shorter_side_only")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    SHORTER_SIDE_ONLY_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    shorter_side_only: bool
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ..., shorter_side_only: _Optional[bool] = ...) -> None: ...

class CenterCrop(_message.Message):
    __slots__ = ("height", "width")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ...) -> None: ...

class Grayscale(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RandomCrop(_message.Message):
    __slots__ = ("height", "width", "padding")
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    height: int
    width: int
    padding: int
    def __init__(self, height: _Optional[int] = ..., width: _Optional[int] = ..., padding: _Optional[int] = ...) -> None: ...

class RandomFlip(_message.Message):
    __slots__ = ("horizontal_probability", "vertical_probability")
    HORIZONTAL_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    VERTICAL_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    horizontal_probability: float
    vertical_probability: float
    def __init__(self, horizontal_probability: _Optional[float] = ..., vertical_probability: _Optional[float] = ...) -> None: ...

class RandomRotation(_message.Message):
    __slots__ = ("degrees",)
    DEGREES_FIELD_NUMBER: _ClassVar[int]
    degrees: float
    def __init__(self, degrees: _Optional[float] = ...) -> None: ...

class ColorJitter(_message.Message):
    __slots__ = ("brightness", "contrast", "saturation")
    BRIGHTNESS_FIELD_NUMBER: _ClassVar[int]
    CONTRAST_FIELD_NUMBER: _ClassVar[int]
    SATURATION_FIELD_NUMBER: _ClassVar[int]
    brightness: float
    contrast: float
    saturation: float
    def __init__(self, brightness: _Optional[float] = ..., contrast: _Optional[float] = ..., saturation: _Optional[float] = ...) -> None: ...

class Custom(_message.Message):
    __slots__ = ("function", "columns", "timeout_s")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    function: str
    columns: _containers.RepeatedScalarFieldContainer[str]
    timeout_s: float
    def __init__(self, function: _Optional[str] = ..., columns: _Optional[_Iterable[str]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class Tokenize(_message.Message):
    __slots__ = ("tokenizer", "vocabulary_size", "max_length", "lowercase", "ids_column", "mask_column")
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOWERCASE_FIELD_NUMBER: _ClassVar[int]
    IDS_COLUMN_FIELD_NUMBER: _ClassVar[int]
    MASK_COLUMN_FIELD_NUMBER: _ClassVar[int]
    tokenizer: str
    vocabulary_size: int
    max_length: int
    lowercase: bool
    ids_column: str
    mask_column: str
    def __init__(self, tokenizer: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., max_length: _Optional[int] = ..., lowercase: _Optional[bool] = ..., ids_column: _Optional[str] = ..., mask_column: _Optional[str] = ...) -> None: ...

class Scalar(_message.Message):
    __slots__ = ("integer", "number", "text", "boolean")
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    integer: int
    number: float
    text: str
    boolean: bool
    def __init__(self, integer: _Optional[int] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., boolean: _Optional[bool] = ...) -> None: ...
