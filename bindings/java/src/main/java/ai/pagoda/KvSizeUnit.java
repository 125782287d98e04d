package ai.pagoda;

/** The unit of a {@link KvSize}. */
public enum KvSizeUnit {
    /** No size is given; an engine then uses 1 GiB. */
    DEFAULT(0),
    /** Pages. */
    PAGES(1),
    /** Bytes, all layers together: as many pages as fit. */
    BYTES(2),
    /** Percent of the free memory of the GPU that the pool is on. */
    PERCENT(3);

    final int number;

    KvSizeUnit(int number) {
        this.number = number;
    }
}
