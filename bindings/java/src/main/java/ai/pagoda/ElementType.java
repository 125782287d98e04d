package ai.pagoda;

import java.util.Locale;

/** The type of a tensor's elements; the order is that of ONNX's numbers. */
public enum ElementType {
    /** Not a tensor (a sequence or a map, as an output of some models), or a type that this version does not know. */
    UNDEFINED(0),
    /** 32-bit float. */
    F32(32),
    /** Unsigned 8-bit integer. */
    U8(8),
    /** Signed 8-bit integer. */
    I8(8),
    /** Unsigned 16-bit integer. */
    U16(16),
    /** Signed 16-bit integer. */
    I16(16),
    /** Signed 32-bit integer. */
    I32(32),
    /** Signed 64-bit integer. */
    I64(64),
    /** UTF-8 text. */
    STRING(0),
    /** Truth value, one byte, 0 or 1. */
    BOOL(8),
    /** 16-bit float (IEEE half); Java has its bits as a {@code short}. */
    F16(16),
    /** 64-bit float. */
    F64(64),
    /** Unsigned 32-bit integer. */
    U32(32),
    /** Unsigned 64-bit integer. */
    U64(64),
    /** Two 32-bit floats. */
    COMPLEX64(64),
    /** Two 64-bit floats. */
    COMPLEX128(128),
    /** 16-bit float with the exponent of a 32-bit one; Java has its bits as a {@code short}. */
    BF16(16),
    /** 8-bit float, 4 bits of exponent, no infinity. */
    F8E4M3FN(8),
    /** 8-bit float, 4 bits of exponent, no infinity, no negative zero. */
    F8E4M3FNUZ(8),
    /** 8-bit float, 5 bits of exponent. */
    F8E5M2(8),
    /** 8-bit float, 5 bits of exponent, no infinity, no negative zero. */
    F8E5M2FNUZ(8),
    /** Unsigned 4-bit integer, two a byte, the first in the low bits. */
    U4(4),
    /** Signed 4-bit integer, two a byte, the first in the low bits. */
    I4(4),
    /** 4-bit float, two a byte, the first in the low bits. */
    F4E2M1(4),
    /** 8-bit power of two, used as a scale. */
    F8E8M0(8),
    /** Unsigned 2-bit integer, four a byte, the first in the low bits. */
    U2(2),
    /** Signed 2-bit integer, four a byte, the first in the low bits. */
    I2(2);

    /** How many bits an element takes; 0 where that can not be said. */
    final int bits;

    ElementType(int bits) {
        this.bits = bits;
    }

    /** The number in pagoda.h. */
    int number() {
        return ordinal();
    }

    static ElementType of(int number) {
        return number >= 0 && number < values().length ? values()[number] : UNDEFINED;
    }

    /**
     * The name that messages use.
     *
     * @return the name, e.g. {@code f32}
     */
    @Override
    public String toString() {
        return name().toLowerCase(Locale.ROOT);
    }
}
