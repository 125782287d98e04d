package ai.pagoda;

import java.util.Objects;

/**
 * The size of a pool of keys and values.
 *
 * @param unit the unit of the value
 * @param value how many
 */
public record KvSize(KvSizeUnit unit, long value) {
    /** The default of an engine: 1 GiB. */
    public static final KvSize DEFAULT = new KvSize(KvSizeUnit.DEFAULT, 0);
    /** No pool, for engines: nothing is cached. */
    public static final KvSize NONE = new KvSize(KvSizeUnit.PAGES, 0);

    /**
     * A size.
     *
     * @param unit the unit of the value
     * @param value how many
     */
    public KvSize {
        Objects.requireNonNull(unit, "unit");
        Native.unsigned(value, "value");
    }

    /**
     * Pages.
     *
     * @param count how many
     * @return the size
     */
    public static KvSize pages(long count) {
        return new KvSize(KvSizeUnit.PAGES, count);
    }

    /**
     * Bytes, all layers together: as many pages as fit.
     *
     * @param count how many
     * @return the size
     */
    public static KvSize bytes(long count) {
        return new KvSize(KvSizeUnit.BYTES, count);
    }

    /**
     * Percent of the free memory of the GPU that the pool is on.
     *
     * @param count how many; 1 to 100
     * @return the size
     */
    public static KvSize percent(long count) {
        return new KvSize(KvSizeUnit.PERCENT, count);
    }
}
