package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

class TensorTest extends Support {
    private static final long[] TWO = {2};

    @ParameterizedTest
    @EnumSource(mode = EnumSource.Mode.EXCLUDE, names = {"UNDEFINED", "STRING"})
    void everyTypeHoldsItsBytes(ElementType type) {
        try (Tensor tensor = Tensor.zeros(type, 3, 5)) {
            assertEquals(type, tensor.type());
            assertArrayEquals(new long[] {3, 5}, tensor.dims());
            assertEquals(15, tensor.size());
            // pagoda.h says how many bytes a tensor of this type has; the binding works it out for itself.
            assertEquals((15 * type.bits + 7) / 8, tensor.bytes().length);
            tensor.buffer().put(0, (byte) 7);
            assertEquals(7, tensor.bytes()[0]);
        }
    }

    @Test
    void arraysAreCopiedBothWays() {
        try (Tensor f32 = Tensor.of(TWO, 1.5f, -2f);
                Tensor f64 = Tensor.of(TWO, 1.5, -2);
                Tensor i64 = Tensor.of(TWO, Long.MIN_VALUE, -2L);
                Tensor i32 = Tensor.of(TWO, 1, Integer.MIN_VALUE);
                Tensor bool = Tensor.of(TWO, true, false);
                Tensor f16 = Tensor.of(ElementType.F16, TWO, (short) 0x3c00, (short) 0xc000);
                Tensor bf16 = Tensor.of(ElementType.BF16, TWO, (short) 0x3f80, (short) 0xc000);
                Tensor u8 = Tensor.of(ElementType.U8, TWO, (byte) 1, (byte) 255)) {
            assertArrayEquals(new float[] {1.5f, -2}, f32.floats());
            assertArrayEquals(new double[] {1.5, -2}, f64.doubles());
            assertArrayEquals(new long[] {Long.MIN_VALUE, -2}, i64.longs());
            assertArrayEquals(new int[] {1, Integer.MIN_VALUE}, i32.ints());
            assertArrayEquals(new byte[] {1, 0}, bool.bytes());
            assertArrayEquals(new short[] {0x3c00, (short) 0xc000}, f16.shorts());
            assertArrayEquals(new short[] {0x3f80, (short) 0xc000}, bf16.shorts());
            assertArrayEquals(new byte[] {1, -1}, u8.bytes());
            assertEquals(ElementType.BF16, bf16.type());
        }
        try (Tensor list = Tensor.of(1f, 2f, 3f); Tensor single = Tensor.of(new long[0], 2.5)) {
            assertArrayEquals(new long[] {3}, list.dims());
            assertEquals(0, single.dims().length);
            assertEquals(2.5, single.doubles()[0]);
        }
        try (Tensor none = Tensor.zeros(ElementType.F32, 0, 3);
                Tensor copied = Tensor.of(new long[] {0}, new float[0])) {
            assertEquals(0, none.floats().length);
            assertEquals(0, none.buffer().capacity());
            assertEquals(0, copied.floats().length);
        }
    }

    @Test
    void buffersShowTheMemory() {
        try (Tensor tensor = Tensor.zeros(ElementType.F32, 2, 2)) {
            tensor.floatBuffer().put(3, 9);
            assertArrayEquals(new float[] {0, 0, 0, 9}, tensor.floats());
            tensor.buffer().putFloat(0, 4);
            assertEquals(4, tensor.floatBuffer().get(0));
        }
        ByteBuffer memory = ByteBuffer.allocateDirect(64).order(ByteOrder.nativeOrder());
        memory.position(8).limit(24);
        try (Tensor tensor = Tensor.of(ElementType.I64, memory, 2)) {
            memory.putLong(16, 5);
            assertArrayEquals(new long[] {0, 5}, tensor.longs());
            tensor.longBuffer().put(0, 6);
            assertEquals(6, memory.getLong(8));
        }
        assertEquals(8, memory.position());
        // Of a longer buffer, what the dimensions say.
        try (Tensor tensor = Tensor.of(ElementType.F32, memory.duplicate().order(ByteOrder.nativeOrder()), 3)) {
            assertEquals(3, tensor.floatBuffer().capacity());
            assertEquals(12, tensor.buffer().capacity());
            assertEquals(3, tensor.floats().length);
        }
        try (Tensor i32 = Tensor.of(1, 2); Tensor f64 = Tensor.of(new long[0], 2.5);
                Tensor f16 = Tensor.zeros(ElementType.F16, 1)) {
            assertEquals(2, i32.intBuffer().get(1));
            assertEquals(2.5, f64.doubleBuffer().get(0));
            assertEquals(0, f16.shortBuffer().get(0));
        }
        collected();
    }

    @Test
    void aBufferStaysGoodAfterItsTensor() {
        FloatBuffer kept;
        try (Tensor tensor = Tensor.of(1f, 2f, 3f)) {
            kept = tensor.floatBuffer();
        }
        for (int i = 0; i < 100; i++) {
            Tensor.of(7f, 7f, 7f).close();
        }
        System.gc();
        assertEquals(1, Pagoda.liveObjects());
        assertEquals(2, kept.get(1));
        kept = null;
        collected();
    }

    @Test
    void strings() {
        String[] texts = {"", "pagoda", "\u5854", "b\0c", "\uD83D\uDE00"};
        try (Tensor tensor = Tensor.of(new long[] {5, 1}, texts); Tensor empty = Tensor.zeros(ElementType.STRING, 2)) {
            assertEquals(ElementType.STRING, tensor.type());
            assertArrayEquals(texts, tensor.strings());
            assertEquals("b\0c", tensor.string(3));
            assertArrayEquals(new String[] {"", ""}, empty.strings());
            fails(Status.INVALID_ARGUMENT, "index", () -> tensor.string(5));
            assertThrows(IllegalArgumentException.class, () -> tensor.string(-1));
            fails(Status.UNSUPPORTED, "tensor", tensor::buffer);
            fails(Status.UNSUPPORTED, "tensor", tensor::bytes);
        }
        fails(Status.INVALID_ARGUMENT, "count", () -> Tensor.of(TWO, "a"));
        assertThrows(IllegalArgumentException.class, () -> Tensor.of(new long[] {1}, "\uD83D"));
        assertThrows(NullPointerException.class, () -> Tensor.of(new long[] {1}, (String) null));
    }

    @Test
    void misuseIsAnException() {
        fails(Status.INVALID_ARGUMENT, "values", () -> Tensor.of(new long[] {3}, 1f, 2f));
        fails(Status.INVALID_ARGUMENT, "dims[0]", () -> Tensor.zeros(ElementType.F32, -1));
        fails(Status.INVALID_ARGUMENT, "dims", () -> Tensor.zeros(ElementType.F32, Long.MAX_VALUE, 9));
        fails(Status.INVALID_ARGUMENT, "type", () -> Tensor.zeros(ElementType.UNDEFINED, 1));
        fails(Status.INVALID_ARGUMENT, "type", () -> Tensor.of(ElementType.F32, TWO, (short) 1, (short) 2));
        fails(Status.INVALID_ARGUMENT, "type", () -> Tensor.of(ElementType.F16, TWO, (byte) 1, (byte) 2));
        ByteBuffer direct = ByteBuffer.allocateDirect(16).order(ByteOrder.nativeOrder());
        fails(Status.INVALID_ARGUMENT, "bytes", () -> Tensor.of(ElementType.F32, direct, 5));
        fails(Status.INVALID_ARGUMENT, "data", () -> Tensor.of(ElementType.I64, direct.duplicate()
                .position(1).slice().order(ByteOrder.nativeOrder()), 1));
        assertThrows(IllegalArgumentException.class,
                () -> Tensor.of(ElementType.F32, ByteBuffer.allocate(16).order(ByteOrder.nativeOrder()), 4));
        assertThrows(IllegalArgumentException.class,
                () -> Tensor.of(ElementType.F32, ByteBuffer.allocateDirect(16).order(ByteOrder.BIG_ENDIAN), 4));
        assertThrows(NullPointerException.class, () -> Tensor.zeros(null, 1));
        assertThrows(NullPointerException.class, () -> Tensor.zeros(ElementType.F32, (long[]) null));
        assertThrows(NullPointerException.class, () -> Tensor.of(ElementType.F32, (ByteBuffer) null, 1));
        assertThrows(NullPointerException.class, () -> Tensor.of((float[]) null));
        try (Tensor tensor = Tensor.of(1f)) {
            fails(Status.INVALID_ARGUMENT, "type", tensor::longs);
            fails(Status.INVALID_ARGUMENT, "type", tensor::longBuffer);
            fails(Status.INVALID_ARGUMENT, "type", tensor::strings);
            fails(Status.INVALID_ARGUMENT, "tensor", () -> tensor.string(0));
        }
    }

    @Test
    void aClosedOneIsAnException() {
        Tensor tensor = Tensor.of(1f);
        tensor.close();
        tensor.close();
        fails(Status.INVALID_HANDLE, "", tensor::type);
        fails(Status.INVALID_HANDLE, "", tensor::dims);
        fails(Status.INVALID_HANDLE, "", tensor::size);
        fails(Status.INVALID_HANDLE, "", tensor::floats);
        fails(Status.INVALID_HANDLE, "", tensor::floatBuffer);
        fails(Status.INVALID_HANDLE, "", tensor::buffer);
        fails(Status.INVALID_HANDLE, "", () -> tensor.string(0));
        assertTrue(assertThrows(PagodaException.class, tensor::type).getMessage().contains("Tensor"));
    }

    /** More than Java may have of it at once, by far: it must come back. */
    @Test
    void theMemoryOfClosedTensorsComesBack() throws Exception {
        for (int i = 0; i < 150; i++) {
            try (Tensor tensor = Tensor.zeros(ElementType.U8, 16 << 20)) {
                tensor.buffer().put(5, (byte) 1);
            }
            if (i % 20 == 19) {
                System.gc();
                Thread.sleep(20);
            }
        }
    }

    /** What only buffers hold goes with them. */
    private static void collected() {
        eventually(() -> {
            System.gc();
            return Pagoda.liveObjects() == 0;
        }, () -> Pagoda.liveObjects() + " objects are left");
    }
}
