package ai.pagoda;

import java.lang.ref.Reference;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.DoubleBuffer;
import java.nio.FloatBuffer;
import java.nio.IntBuffer;
import java.nio.LongBuffer;
import java.nio.ShortBuffer;
import java.util.Objects;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.Consumer;
import java.util.function.Function;
import java.util.function.LongConsumer;

/**
 * A tensor: a type, dimensions, and memory, which runs read and write in place. Closing one while a run uses it is
 * fine: the memory goes when the run is done.
 *
 * <p>{@link #buffer} and its kin show that memory without a copy. A buffer stays good for as long as it can be reached,
 * also when the tensor was closed. So the memory of an output of a run goes only when the garbage collector has found
 * that its buffer is gone; where that is too late, take a copy ({@link #floats} and its kin), or bind a tensor of your
 * own to the output. The caller orders reads and writes: neither while a run writes the same memory, and no write while
 * a run reads it.
 */
public final class Tensor extends NativeObject {
    static {
        Native.load();
    }

    private final Hold hold;
    private final ElementType type;
    private final long[] dims;
    /** Whether its memory must not be written to, as that of a file that is mapped for reading. */
    final boolean readOnly;
    /** What {@link #buffer} hands out views of; null until it is asked for, and after a close. */
    private ByteBuffer memory;

    /** Takes a handle over. */
    Tensor(long handle) {
        this(handle, new Hold(), null);
    }

    private Tensor(long handle, Hold hold, ByteBuffer memory) {
        super(handle, hold);
        this.hold = hold;
        this.memory = memory;
        readOnly = memory != null && memory.isReadOnly();
        try {
            type = ElementType.of(type(handle));
            dims = dims(handle);
        } catch (Throwable error) {
            close();
            throw error;
        }
    }

    /**
     * Makes a tensor of zeros, or of empty strings. Its memory is Java's, as of a direct buffer.
     *
     * @param type the type of its elements
     * @param dims its dimensions; none for a single number
     * @return the tensor
     */
    public static Tensor zeros(ElementType type, long... dims) {
        long bytes = bytes(Objects.requireNonNull(type, "type"), Objects.requireNonNull(dims, "dims"));
        if (bytes < 0 || bytes > Integer.MAX_VALUE - 128) {
            return new Tensor(make(type.number(), dims.clone()));
        }
        // A slice is cut at both ends.
        ByteBuffer memory = ByteBuffer.allocateDirect((int) bytes + 128).alignedSlice(64);
        return of(type, memory.limit((int) bytes).order(ByteOrder.nativeOrder()), dims);
    }

    /**
     * Makes a tensor over the memory of a direct buffer, from its position on; nothing is copied. What the buffer has
     * beyond the bytes of the tensor, up to its limit, is no part of it. The memory stays until the tensor is closed
     * and every run that uses it is done. A read-only buffer makes a tensor that can not be bound to an output.
     *
     * @param type the type of its elements
     * @param memory a direct buffer in the machine's byte order; memory of an {@code Arena} must stay open meanwhile
     * @param dims its dimensions; none for a single number
     * @return the tensor
     */
    public static Tensor of(ElementType type, ByteBuffer memory, long... dims) {
        Objects.requireNonNull(type, "type");
        Objects.requireNonNull(dims, "dims");
        if (!Objects.requireNonNull(memory, "memory").isDirect()) {
            throw new IllegalArgumentException("memory: the buffer is on Java's heap: use ByteBuffer.allocateDirect");
        }
        if (memory.order() != ByteOrder.nativeOrder()) {
            throw new IllegalArgumentException("memory: the buffer's order is " + memory.order()
                    + ": use order(ByteOrder.nativeOrder()), and write to it after that");
        }
        ByteBuffer slice = memory.slice();
        long[] shape = dims.clone();
        long bytes = bytes(type, shape);
        if (bytes >= 0 && bytes < slice.capacity()) {
            slice = slice.slice(0, (int) bytes);
        }
        return new Tensor(borrow(type.number(), shape, slice, slice.capacity()), new Hold(),
                slice.order(ByteOrder.nativeOrder()));
    }

    /**
     * Makes a tensor of one dimension with a copy of numbers.
     *
     * @param values the numbers
     * @return a tensor of f32
     */
    public static Tensor of(float... values) {
        return of(new long[] {values.length}, values);
    }

    /**
     * Makes a tensor of one dimension with a copy of numbers.
     *
     * @param values the numbers
     * @return a tensor of i64
     */
    public static Tensor of(long... values) {
        return of(new long[] {values.length}, values);
    }

    /**
     * Makes a tensor of one dimension with a copy of numbers.
     *
     * @param values the numbers
     * @return a tensor of i32
     */
    public static Tensor of(int... values) {
        return of(new long[] {values.length}, values);
    }

    /**
     * Makes a tensor with a copy of numbers.
     *
     * @param dims its dimensions; none for a single number
     * @param values the numbers, those of the last dimension one after the other
     * @return a tensor of f32
     */
    public static Tensor of(long[] dims, float... values) {
        return filled(ElementType.F32, dims, values.length, memory -> memory.asFloatBuffer().put(values));
    }

    /**
     * Makes a tensor with a copy of numbers.
     *
     * @param dims its dimensions; none for a single number
     * @param values the numbers, those of the last dimension one after the other
     * @return a tensor of f64
     */
    public static Tensor of(long[] dims, double... values) {
        return filled(ElementType.F64, dims, values.length, memory -> memory.asDoubleBuffer().put(values));
    }

    /**
     * Makes a tensor with a copy of numbers.
     *
     * @param dims its dimensions; none for a single number
     * @param values the numbers, those of the last dimension one after the other
     * @return a tensor of i64
     */
    public static Tensor of(long[] dims, long... values) {
        return filled(ElementType.I64, dims, values.length, memory -> memory.asLongBuffer().put(values));
    }

    /**
     * Makes a tensor with a copy of numbers.
     *
     * @param dims its dimensions; none for a single number
     * @param values the numbers, those of the last dimension one after the other
     * @return a tensor of i32
     */
    public static Tensor of(long[] dims, int... values) {
        return filled(ElementType.I32, dims, values.length, memory -> memory.asIntBuffer().put(values));
    }

    /**
     * Makes a tensor with a copy of truth values.
     *
     * @param dims its dimensions; none for a single value
     * @param values the values, those of the last dimension one after the other
     * @return a tensor of bool
     */
    public static Tensor of(long[] dims, boolean... values) {
        return filled(ElementType.BOOL, dims, values.length, memory -> {
            for (boolean value : values) {
                memory.put((byte) (value ? 1 : 0));
            }
        });
    }

    /**
     * Makes a tensor with a copy of 16-bit numbers.
     *
     * @param type what the bits mean: i16, u16, f16 or bf16
     * @param dims its dimensions; none for a single number
     * @param values the bits of the numbers
     * @return the tensor
     */
    public static Tensor of(ElementType type, long[] dims, short... values) {
        return filled(wide(type, 16), dims, values.length, memory -> memory.asShortBuffer().put(values));
    }

    /**
     * Makes a tensor with a copy of 8-bit numbers.
     *
     * @param type what the bits mean: i8, u8, bool or one of the 8-bit floats
     * @param dims its dimensions; none for a single number
     * @param values the bits of the numbers
     * @return the tensor
     */
    public static Tensor of(ElementType type, long[] dims, byte... values) {
        return filled(wide(type, 8), dims, values.length, memory -> memory.put(values));
    }

    /**
     * Makes a tensor with a copy of texts.
     *
     * @param dims its dimensions; none for a single text
     * @param values the texts
     * @return a tensor of strings
     */
    public static Tensor of(long[] dims, String... values) {
        byte[][] texts = new byte[values.length][];
        int[] lengths = new int[values.length];
        int sum = 0;
        for (int i = 0; i < texts.length; i++) {
            texts[i] = Native.utf8(values[i], "values[" + i + "]");
            lengths[i] = texts[i].length;
            sum = Math.addExact(sum, lengths[i]);
        }
        ByteBuffer all = ByteBuffer.allocate(sum);
        for (byte[] text : texts) {
            all.put(text);
        }
        return new Tensor(makeStrings(all.array(), lengths, Objects.requireNonNull(dims, "dims").clone()));
    }

    /**
     * The type of the elements.
     *
     * @return the type
     */
    public ElementType type() {
        handle();
        return type;
    }

    /**
     * The dimensions.
     *
     * @return a copy of them
     */
    public long[] dims() {
        handle();
        return dims.clone();
    }

    /**
     * How many elements there are.
     *
     * @return the number
     */
    public long size() {
        handle();
        long size = 1;
        for (long dim : dims) {
            size *= dim;
        }
        return size;
    }

    /**
     * The memory, not a copy, in the machine's byte order.
     *
     * @return a buffer over all of it, read-only if the tensor was made over one that is
     */
    public ByteBuffer buffer() {
        ByteBuffer shared;
        synchronized (hold) {
            handle();
            if (memory == null) {
                memory = lasting();
            }
            shared = memory;
        }
        return shared.duplicate().order(ByteOrder.nativeOrder());
    }

    /**
     * The memory, not a copy.
     *
     * @return a buffer over all elements, which must be f32
     */
    public FloatBuffer floatBuffer() {
        expect(ElementType.F32);
        return buffer().asFloatBuffer();
    }

    /**
     * The memory, not a copy.
     *
     * @return a buffer over all elements, which must be f64
     */
    public DoubleBuffer doubleBuffer() {
        expect(ElementType.F64);
        return buffer().asDoubleBuffer();
    }

    /**
     * The memory, not a copy.
     *
     * @return a buffer over all elements, which must be i64 or u64
     */
    public LongBuffer longBuffer() {
        expect(ElementType.I64, ElementType.U64);
        return buffer().asLongBuffer();
    }

    /**
     * The memory, not a copy.
     *
     * @return a buffer over all elements, which must be i32 or u32
     */
    public IntBuffer intBuffer() {
        expect(ElementType.I32, ElementType.U32);
        return buffer().asIntBuffer();
    }

    /**
     * The memory, not a copy.
     *
     * @return a buffer over the bits of all elements, which must be i16, u16, f16 or bf16
     */
    public ShortBuffer shortBuffer() {
        expect(ElementType.I16, ElementType.U16, ElementType.F16, ElementType.BF16);
        return buffer().asShortBuffer();
    }

    /**
     * A copy of the elements.
     *
     * @return all elements, which must be f32
     */
    public float[] floats() {
        expect(ElementType.F32);
        return with(memory -> {
            float[] values = new float[memory.remaining() / 4];
            memory.asFloatBuffer().get(values);
            return values;
        });
    }

    /**
     * A copy of the elements.
     *
     * @return all elements, which must be f64
     */
    public double[] doubles() {
        expect(ElementType.F64);
        return with(memory -> {
            double[] values = new double[memory.remaining() / 8];
            memory.asDoubleBuffer().get(values);
            return values;
        });
    }

    /**
     * A copy of the elements.
     *
     * @return all elements, which must be i64 or u64
     */
    public long[] longs() {
        expect(ElementType.I64, ElementType.U64);
        return with(memory -> {
            long[] values = new long[memory.remaining() / 8];
            memory.asLongBuffer().get(values);
            return values;
        });
    }

    /**
     * A copy of the elements.
     *
     * @return all elements, which must be i32 or u32
     */
    public int[] ints() {
        expect(ElementType.I32, ElementType.U32);
        return with(memory -> {
            int[] values = new int[memory.remaining() / 4];
            memory.asIntBuffer().get(values);
            return values;
        });
    }

    /**
     * A copy of the elements.
     *
     * @return the bits of all elements, which must be i16, u16, f16 or bf16
     */
    public short[] shorts() {
        expect(ElementType.I16, ElementType.U16, ElementType.F16, ElementType.BF16);
        return with(memory -> {
            short[] values = new short[memory.remaining() / 2];
            memory.asShortBuffer().get(values);
            return values;
        });
    }

    /**
     * A copy of the memory.
     *
     * @return all bytes, of any type but strings
     */
    public byte[] bytes() {
        return with(memory -> {
            byte[] values = new byte[memory.remaining()];
            memory.get(values);
            return values;
        });
    }

    /**
     * The texts.
     *
     * @return all texts of a tensor of strings
     */
    public String[] strings() {
        expect(ElementType.STRING);
        String[] texts = new String[Math.toIntExact(size())];
        for (int i = 0; i < texts.length; i++) {
            texts[i] = string(i);
        }
        return texts;
    }

    /**
     * One text.
     *
     * @param index which, counted over all dimensions
     * @return the text
     */
    public String string(long index) {
        hold.take(this);
        try {
            return Native.string(string(handle(), Native.unsigned(index, "index")));
        } finally {
            hold.drop();
        }
    }

    @Override
    public void close() {
        super.close();
        synchronized (hold) {
            memory = null;
        }
    }

    /** The bytes of a shape, or -1 if pagoda.h is to say what is wrong with it. */
    private static long bytes(ElementType type, long[] dims) {
        try {
            long bits = type.bits == 0 ? -1 : type.bits;
            for (long dim : dims) {
                bits = dim < 0 ? -1 : Math.multiplyExact(bits, dim);
                if (bits < 0) {
                    return -1;
                }
            }
            return bits < 0 ? -1 : Math.addExact(bits, 7) / 8;
        } catch (ArithmeticException tooLarge) {
            return -1;
        }
    }

    private static ElementType wide(ElementType type, int bits) {
        if (Objects.requireNonNull(type, "type").bits != bits) {
            throw new PagodaException(Status.INVALID_ARGUMENT,
                    "type: elements of " + type + " do not have " + bits + " bits", "type");
        }
        return type;
    }

    private static Tensor filled(ElementType type, long[] dims, int count, Consumer<ByteBuffer> fill) {
        Tensor tensor = new Tensor(make(type.number(), Objects.requireNonNull(dims, "dims").clone()));
        try {
            if (tensor.size() != count) {
                throw new PagodaException(Status.INVALID_ARGUMENT,
                        "values: there are " + count + ", not the " + tensor.size() + " of the dimensions", "values");
            }
            tensor.with(memory -> {
                fill.accept(memory);
                return null;
            });
            return tensor;
        } catch (RuntimeException error) {
            tensor.close();
            throw error;
        }
    }

    private void expect(ElementType... types) {
        ElementType mine = type();
        for (ElementType type : types) {
            if (type == mine) {
                return;
            }
        }
        throw new PagodaException(
                Status.INVALID_ARGUMENT, "this is a tensor of " + mine + ", not of " + types[0], "type");
    }

    /** All of the memory, which stays as long as this buffer can be reached; views of a buffer can reach it. */
    private ByteBuffer lasting() {
        hold.take(this);
        ByteBuffer made = null;
        try {
            made = view();
            CLEANER.register(made, hold::drop);
            return made;
        } finally {
            if (made == null) {
                hold.drop();
            }
        }
    }

    /** Uses the memory for a moment; no buffer of it gets away, so a close frees it at once. */
    private <T> T with(Function<ByteBuffer, T> use) {
        hold.take(this);
        try {
            return use.apply(view());
        } finally {
            hold.drop();
            Reference.reachabilityFence(this);
        }
    }

    /** All of the memory. The caller has a hold on it. */
    private ByteBuffer view() {
        ByteBuffer seen = view(handle());
        if (seen == null) {
            throw new UnsupportedOperationException("this tensor is larger than 2147483647 bytes, which is the most "
                    + "that a buffer or an array of Java holds");
        }
        return seen.order(ByteOrder.nativeOrder());
    }

    /** Frees the handle when the tensor, and the buffer that shows its memory, are both gone. */
    private static final class Hold implements LongConsumer {
        private final AtomicInteger holders = new AtomicInteger(1);
        private volatile long closed;

        /** By the tensor, when it is closed. */
        @Override
        public void accept(long handle) {
            closed = handle;
            drop();
        }

        void take(Tensor tensor) {
            if (holders.getAndUpdate(count -> count == 0 ? 0 : count + 1) == 0) {
                throw tensor.closed();
            }
        }

        void drop() {
            if (holders.decrementAndGet() == 0) {
                free(closed);
            }
        }
    }

    private static native long make(int type, long[] dims);

    private static native long makeStrings(byte[] bytes, int[] lengths, long[] dims);

    private static native long borrow(int type, long[] dims, ByteBuffer memory, long bytes);

    private static native int type(long handle);

    private static native long[] dims(long handle);

    private native ByteBuffer view(long handle);

    private native byte[] string(long handle, long index);

    static native void free(long handle);
}
