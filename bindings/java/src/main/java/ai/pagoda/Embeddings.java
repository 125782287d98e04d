package ai.pagoda;

import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.nio.file.Path;
import java.util.Objects;

/**
 * Tables of embedding rows, of any number of models: a cache over host memory, a Redis Cluster, and disk, as a
 * configuration says. A table is named {@code model/table}, or {@code table} alone if that is no other's name.
 */
public final class Embeddings extends NativeObject {
    static {
        Native.load();
    }

    private Embeddings(long handle) {
        super(handle, Embeddings::free);
    }

    /**
     * Opens the tables of a configuration file, HugeCTR's ps.json or one with Pagoda's own words.
     *
     * @param path the file; relative paths in it are relative to its folder
     * @return the tables
     */
    public static Embeddings open(Path path) {
        return new Embeddings(open(text(path)));
    }

    /**
     * How much the tables of a configuration file will take; nothing is opened but the headers of the tables.
     *
     * @param path the file
     * @return the bytes of memory and of disk
     */
    public static EmbeddingEstimate estimate(Path path) {
        long[] bytes = new long[2];
        estimate(text(path), bytes);
        return new EmbeddingEstimate(bytes[0], bytes[1]);
    }

    /**
     * Adds a model while others serve. Tables that another model has already are shared.
     *
     * @param model an element of the configuration's {@code models}, as JSON
     * @param folder what relative paths in it are relative to; {@code null} = the working directory
     */
    public void add(String model, Path folder) {
        add(handle(), Native.text(model, "model"), folder == null ? null : text(folder));
    }

    /**
     * Takes a model out of service. Its tables go when no other model has them; lookups that are under way end well.
     *
     * @param model its name
     */
    public void retire(String model) {
        retire(handle(), Native.text(model, "model"));
    }

    /**
     * How many numbers a row of a table has.
     *
     * @param table the table
     * @return the number
     */
    public int dim(String table) {
        return Math.toIntExact(dim(handle(), Native.text(table, "table")));
    }

    /**
     * Looks keys up, with what the table's hit rate says about those that the cache does not have.
     *
     * @param table the table
     * @param keys the keys, any number of times each
     * @return the row of each key, or the table's default vector
     */
    public EmbeddingRows lookup(String table, long... keys) {
        return lookup(table, keys, Miss.BY_HIT_RATE);
    }

    /**
     * Looks keys up.
     *
     * @param table the table
     * @param keys the keys, any number of times each
     * @param miss what is done about keys that the cache does not have
     * @return the row of each key, or the table's default vector
     */
    public EmbeddingRows lookup(String table, long[] keys, Miss miss) {
        return rows(table, keys, null, Combiner.SUM, miss, keys.length);
    }

    /**
     * Looks keys up from direct buffers into direct buffers; nothing is copied on the way, and no position moves.
     *
     * @param table the table
     * @param keys the keys, from the buffer's position to its limit
     * @param miss what is done about keys that the cache does not have
     * @param numbers gets the rows from its position on; it must have just the room for them
     * @param found gets from its position on a 1 for each key that was found and a 0 for each other; {@code null} = not
     *     asked
     */
    public void lookup(String table, LongBuffer keys, Miss miss, FloatBuffer numbers, ByteBuffer found) {
        direct(table, keys, null, Combiner.SUM, miss, numbers, found);
    }

    /**
     * Looks keys up and combines them.
     *
     * @param table the table
     * @param keys the keys, any number of times each
     * @param offsets where the keys of each slot begin, and the number of keys at the end
     * @param combiner how the rows of a slot become one vector
     * @param miss what is done about keys that the cache does not have
     * @return a vector for each slot, zeros where it has no keys; {@link EmbeddingRows#found} goes by keys
     */
    public EmbeddingRows pool(String table, long[] keys, long[] offsets, Combiner combiner, Miss miss) {
        Objects.requireNonNull(offsets, "offsets");
        return rows(table, keys, offsets, combiner, miss, Math.max(offsets.length - 1, 0));
    }

    /**
     * Looks keys up from direct buffers, and combines them, into direct buffers.
     *
     * @param table the table
     * @param keys the keys, from the buffer's position to its limit
     * @param offsets where the keys of each slot begin, and the number of keys at the end
     * @param combiner how the rows of a slot become one vector
     * @param miss what is done about keys that the cache does not have
     * @param numbers gets a vector for each slot from its position on; it must have just the room for them
     * @param found gets from its position on a 1 for each key that was found and a 0 for each other; {@code null} = not
     *     asked
     */
    public void pool(String table, LongBuffer keys, long[] offsets, Combiner combiner, Miss miss, FloatBuffer numbers,
            ByteBuffer found) {
        direct(table, keys, Objects.requireNonNull(offsets, "offsets"), combiner, miss, numbers, found);
    }

    /**
     * Replaces rows or adds them, in all tiers and in the cache. A row that has a higher version already stays; rows
     * that the table was loaded with have version 0.
     *
     * @param table the table
     * @param version the version of the change
     * @param keys the keys; of one that comes twice the last row counts
     * @param numbers a row for each key, one after the other
     * @param reach when lookups see it
     */
    public void upsert(String table, long version, long[] keys, float[] numbers, Reach reach) {
        upsert(handle(), Native.text(table, "table"), version, Objects.requireNonNull(keys, "keys"),
                Objects.requireNonNull(numbers, "numbers"), Objects.requireNonNull(reach, "reach").number);
    }

    /**
     * Deletes rows, in all tiers and from the cache: their keys get the default vector. A row that has a higher
     * version stays.
     *
     * @param table the table
     * @param version the version of the change
     * @param keys the keys
     * @param reach when lookups see it
     */
    public void delete(String table, long version, long[] keys, Reach reach) {
        delete(handle(), Native.text(table, "table"), version, Objects.requireNonNull(keys, "keys"),
                Objects.requireNonNull(reach, "reach").number);
    }

    /**
     * Begins to bring keys that are expected soon into the cache and returns at once.
     *
     * @param table the table
     * @param keys the keys
     * @return how many were not there and found room in the queue
     */
    public long prefetch(String table, long... keys) {
        return prefetch(handle(), Native.text(table, "table"), Objects.requireNonNull(keys, "keys"));
    }

    /**
     * Reloads all rows in the cache of a table from the backing tiers.
     *
     * @param table the table
     */
    public void refresh(String table) {
        refresh(handle(), Native.text(table, "table"));
    }

    /** Waits until everything that was to be fetched or loaded in the background is. */
    public void await() {
        await(handle());
    }

    /**
     * What a table did since it was opened.
     *
     * @param table the table
     * @return the numbers
     */
    public TableStats stats(String table) {
        return TableStats.of(stats(handle(), Native.text(table, "table")));
    }

    private static byte[] text(Path path) {
        return Native.text(Objects.requireNonNull(path, "path").toString(), "path");
    }

    private EmbeddingRows rows(String table, long[] keys, long[] offsets, Combiner combiner, Miss miss, int count) {
        byte[] name = Native.text(table, "table");
        Objects.requireNonNull(combiner, "combiner");
        Objects.requireNonNull(miss, "miss");
        int dim = Math.toIntExact(dim(handle(), name));
        float[] numbers = new float[Math.multiplyExact(count, dim)];
        byte[] found = new byte[keys.length];
        look(handle(), name, keys, offsets, combiner.number, miss.number, miss.limitUs, numbers, found);
        return new EmbeddingRows(dim, numbers, found);
    }

    private void direct(String table, LongBuffer keys, long[] offsets, Combiner combiner, Miss miss,
            FloatBuffer numbers, ByteBuffer found) {
        byte[] name = Native.text(table, "table");
        Objects.requireNonNull(combiner, "combiner");
        Objects.requireNonNull(miss, "miss");
        LongBuffer from = usable(keys, keys.order(), "keys").slice();
        FloatBuffer to = writable(usable(numbers, numbers.order(), "numbers"), "numbers").slice();
        ByteBuffer marks = null;
        if (found != null) {
            marks = writable(usable(found, ByteOrder.nativeOrder(), "found"), "found").slice();
            if (marks.capacity() < from.capacity()) {
                throw new PagodaException(Status.INVALID_ARGUMENT,
                        "found: there is room for " + marks.capacity() + " keys, not for " + from.capacity(), "found");
            }
        }
        lookDirect(handle(), name, from, from.capacity(), offsets, combiner.number, miss.number, miss.limitUs, to,
                to.capacity(), marks);
    }

    private static <B extends Buffer> B usable(B buffer, ByteOrder order, String name) {
        if (!buffer.isDirect() || order != ByteOrder.nativeOrder()) {
            throw new IllegalArgumentException(name + ": the buffer must be direct and in the machine's byte order: "
                    + "use ByteBuffer.allocateDirect(...).order(ByteOrder.nativeOrder())");
        }
        return buffer;
    }

    private static <B extends Buffer> B writable(B buffer, String name) {
        if (buffer.isReadOnly()) {
            throw new IllegalArgumentException(name + ": the buffer is read-only: give one that can be written to");
        }
        return buffer;
    }

    private static native long open(byte[] path);

    private static native void estimate(byte[] path, long[] bytes);

    private native void add(long handle, byte[] model, byte[] folder);

    private native void retire(long handle, byte[] model);

    private native long dim(long handle, byte[] table);

    private native void look(long handle, byte[] table, long[] keys, long[] offsets, int combiner, int miss,
            long limitUs, float[] numbers, byte[] found);

    private native void lookDirect(long handle, byte[] table, LongBuffer keys, long keyCount, long[] offsets,
            int combiner, int miss, long limitUs, FloatBuffer numbers, long numberCount, ByteBuffer found);

    private native void upsert(long handle, byte[] table, long version, long[] keys, float[] numbers, int reach);

    private native void delete(long handle, byte[] table, long version, long[] keys, int reach);

    private native long prefetch(long handle, byte[] table, long[] keys);

    private native void refresh(long handle, byte[] table);

    private native void await(long handle);

    private native long[] stats(long handle, byte[] table);

    private static native void free(long handle);
}
