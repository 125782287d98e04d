package ai.pagoda;

import java.util.Objects;

/** How to open a store. What is not set stays at its default. */
public final class StoreOptions {
    private long durability = Native.UNSET;
    private long maxBytes = Native.UNSET;
    private long segmentBytes = Native.UNSET;
    private long queueBytes = Native.UNSET;
    private long garbageBytes = Native.UNSET;

    /** The defaults. */
    public StoreOptions() {}

    /**
     * When a write counts as done; default {@link Durability#POWER}.
     *
     * @param durability when
     * @return these options
     */
    public StoreOptions durability(Durability durability) {
        this.durability = Objects.requireNonNull(durability, "durability").number;
        return this;
    }

    /**
     * How many bytes the files may take before the owners that were not used for longest leave; default 0: no limit.
     *
     * @param maxBytes how many
     * @return these options
     */
    public StoreOptions maxBytes(long maxBytes) {
        this.maxBytes = Native.unsigned(maxBytes, "maxBytes");
        return this;
    }

    /**
     * How long a file gets before the next one is begun; default 0: 256 MiB, or an eighth of {@link #maxBytes} if that
     * is less.
     *
     * @param segmentBytes how many bytes
     * @return these options
     */
    public StoreOptions segmentBytes(long segmentBytes) {
        this.segmentBytes = Native.unsigned(segmentBytes, "segmentBytes");
        return this;
    }

    /**
     * How many bytes may wait to be written before a write has to wait or is refused; default 0: 256 MiB.
     *
     * @param queueBytes how many
     * @return these options
     */
    public StoreOptions queueBytes(long queueBytes) {
        this.queueBytes = Native.unsigned(queueBytes, "queueBytes");
        return this;
    }

    /**
     * How many bytes of removed and replaced records the files may have before they are compacted; default 0: 64 MiB.
     *
     * @param garbageBytes how many
     * @return these options
     */
    public StoreOptions garbageBytes(long garbageBytes) {
        this.garbageBytes = Native.unsigned(garbageBytes, "garbageBytes");
        return this;
    }

    /** In the order that store.c reads them. */
    long[] numbers() {
        return new long[] {durability, maxBytes, segmentBytes, queueBytes, garbageBytes};
    }
}
