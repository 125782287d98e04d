package pagoda

// #include "bridge.h"
import "C"

// ElementType is the type of a tensor's elements.
type ElementType int32

// The types of elements, by ONNX's numbers. Those without a Go type go by bytes: see [NewTensorOf] and [Tensor.Bytes].
const (
	Undefined  ElementType = C.PAGODA_ELEMENT_TYPE_UNDEFINED  // Not a tensor.
	F32        ElementType = C.PAGODA_ELEMENT_TYPE_F32        // float32
	U8         ElementType = C.PAGODA_ELEMENT_TYPE_U8         // uint8
	I8         ElementType = C.PAGODA_ELEMENT_TYPE_I8         // int8
	U16        ElementType = C.PAGODA_ELEMENT_TYPE_U16        // uint16
	I16        ElementType = C.PAGODA_ELEMENT_TYPE_I16        // int16
	I32        ElementType = C.PAGODA_ELEMENT_TYPE_I32        // int32
	I64        ElementType = C.PAGODA_ELEMENT_TYPE_I64        // int64
	String     ElementType = C.PAGODA_ELEMENT_TYPE_STRING     // string, UTF-8
	Bool       ElementType = C.PAGODA_ELEMENT_TYPE_BOOL       // bool
	F16        ElementType = C.PAGODA_ELEMENT_TYPE_F16        // [Float16]
	F64        ElementType = C.PAGODA_ELEMENT_TYPE_F64        // float64
	U32        ElementType = C.PAGODA_ELEMENT_TYPE_U32        // uint32
	U64        ElementType = C.PAGODA_ELEMENT_TYPE_U64        // uint64
	Complex64  ElementType = C.PAGODA_ELEMENT_TYPE_COMPLEX64  // complex64
	Complex128 ElementType = C.PAGODA_ELEMENT_TYPE_COMPLEX128 // complex128
	BF16       ElementType = C.PAGODA_ELEMENT_TYPE_BF16       // [BFloat16]
	F8E4M3FN   ElementType = C.PAGODA_ELEMENT_TYPE_F8E4M3FN   // 8-bit float, 4 bits of exponent, no infinity.
	F8E4M3FNUZ ElementType = C.PAGODA_ELEMENT_TYPE_F8E4M3FNUZ // The same without negative zero.
	F8E5M2     ElementType = C.PAGODA_ELEMENT_TYPE_F8E5M2     // 8-bit float, 5 bits of exponent.
	F8E5M2FNUZ ElementType = C.PAGODA_ELEMENT_TYPE_F8E5M2FNUZ // The same without infinity and negative zero.
	U4         ElementType = C.PAGODA_ELEMENT_TYPE_U4         // Unsigned 4-bit integer, two a byte, the first in the low bits.
	I4         ElementType = C.PAGODA_ELEMENT_TYPE_I4         // Signed 4-bit integer, in the same way.
	F4E2M1     ElementType = C.PAGODA_ELEMENT_TYPE_F4E2M1     // 4-bit float, in the same way.
	F8E8M0     ElementType = C.PAGODA_ELEMENT_TYPE_F8E8M0     // 8-bit power of two, used as a scale.
	U2         ElementType = C.PAGODA_ELEMENT_TYPE_U2         // Unsigned 2-bit integer, four a byte, the first in the low bits.
	I2         ElementType = C.PAGODA_ELEMENT_TYPE_I2         // Signed 2-bit integer, in the same way.
)

// String is the name of the type, such as "f32".
func (t ElementType) String() string {
	return C.GoString(C.pagoda_element_type_name(C.pagoda_element_type(t)))
}

// Float16 is the bits of a 16-bit float (IEEE half).
type Float16 uint16

// BFloat16 is the bits of a 16-bit float with the exponent of a 32-bit one.
type BFloat16 uint16

// Element is what a tensor can have elements of.
type Element interface {
	float32 | float64 | int8 | int16 | int32 | int64 | uint8 | uint16 | uint32 | uint64 | bool | string |
		complex64 | complex128 | Float16 | BFloat16
}

// TypeOf is the [ElementType] of a Go type.
func TypeOf[T Element]() ElementType {
	var element T
	switch any(element).(type) {
	case float32:
		return F32
	case float64:
		return F64
	case int8:
		return I8
	case int16:
		return I16
	case int32:
		return I32
	case int64:
		return I64
	case uint8:
		return U8
	case uint16:
		return U16
	case uint32:
		return U32
	case uint64:
		return U64
	case bool:
		return Bool
	case string:
		return String
	case complex64:
		return Complex64
	case complex128:
		return Complex128
	case Float16:
		return F16
	case BFloat16:
		return BF16
	}
	return Undefined
}
