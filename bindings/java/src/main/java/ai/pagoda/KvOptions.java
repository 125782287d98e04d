package ai.pagoda;

import java.util.Objects;

/**
 * The shape, the size and the behaviour of a cache. Layers, heads, the size of a head and the size of the pool must be
 * set; the rest has defaults.
 */
public final class KvOptions {
    private long layers = Native.UNSET;
    private long heads = Native.UNSET;
    private long headSize = Native.UNSET;
    private long pageSize = Native.UNSET;
    private long type = Native.UNSET;
    private KvSize size = KvSize.DEFAULT;
    private long maxHistory = Native.UNSET;
    private long overlap = Native.UNSET;
    private long edited = Native.UNSET;
    private long offload = Native.UNSET;
    private long onloadInBackground = Native.UNSET;
    private long onloadThreads = Native.UNSET;
    private long aheadPercent = Native.UNSET;
    private long deviceId = Native.UNSET;
    private String modelVersion;
    private Store store;

    /** The defaults. */
    public KvOptions() {}

    /**
     * Layers of the model that keep keys and values.
     *
     * @param layers how many
     * @return these options
     */
    public KvOptions layers(int layers) {
        this.layers = layers;
        return this;
    }

    /**
     * Heads of keys and values in each layer.
     *
     * @param heads how many
     * @return these options
     */
    public KvOptions heads(int heads) {
        this.heads = heads;
        return this;
    }

    /**
     * The size of a head.
     *
     * @param headSize how many numbers
     * @return these options
     */
    public KvOptions headSize(int headSize) {
        this.headSize = headSize;
        return this;
    }

    /**
     * Tokens that a page holds, a multiple of 8; default 32.
     *
     * @param pageSize how many
     * @return these options
     */
    public KvOptions pageSize(int pageSize) {
        this.pageSize = pageSize;
        return this;
    }

    /**
     * The type of keys and values: f32 (the default), f16 or bf16.
     *
     * @param type which
     * @return these options
     */
    public KvOptions type(ElementType type) {
        this.type = Objects.requireNonNull(type, "type").number();
        return this;
    }

    /**
     * The size of the pool.
     *
     * @param size the size
     * @return these options
     */
    public KvOptions size(KvSize size) {
        this.size = Objects.requireNonNull(size, "size");
        return this;
    }

    /**
     * The GPU whose memory holds the pool; default -1: host memory. {@link Tensor#buffer} and its kin reject tensors on
     * a GPU.
     *
     * @param deviceId its number
     * @return these options
     */
    public KvOptions deviceId(int deviceId) {
        this.deviceId = deviceId;
        return this;
    }

    /**
     * The most tokens of a history that are kept; default 0: all. Older ones leave page by page.
     *
     * @param maxHistory how many
     * @return these options
     */
    public KvOptions maxHistory(int maxHistory) {
        this.maxHistory = maxHistory;
        return this;
    }

    /**
     * What becomes of new tokens that are cached already; default {@link Overlap#REFUSE}.
     *
     * @param overlap what
     * @return these options
     */
    public KvOptions overlap(Overlap overlap) {
        this.overlap = Objects.requireNonNull(overlap, "overlap").number;
        return this;
    }

    /**
     * Whether requests bring the items of the history, and what happens when they are not those that are cached;
     * default
     * {@link Edited#UNNOTICED}.
     *
     * @param edited what
     * @return these options
     */
    public KvOptions edited(Edited edited) {
        this.edited = Objects.requireNonNull(edited, "edited").number;
        return this;
    }

    /**
     * When histories go to the store; default {@link Offload#ON_EVICTION}.
     *
     * @param offload when
     * @return these options
     */
    public KvOptions offload(Offload offload) {
        this.offload = Objects.requireNonNull(offload, "offload").number;
        return this;
    }

    /**
     * Whether {@link KvCache#prepare} returns before everything has arrived from the store, and {@link KvLease#await}
     * waits for it; default: it waits itself.
     *
     * @param onloadInBackground whether it returns before
     * @return these options
     */
    public KvOptions onloadInBackground(boolean onloadInBackground) {
        this.onloadInBackground = onloadInBackground ? 1 : 0;
        return this;
    }

    /**
     * Threads that read the store; default 0: two.
     *
     * @param onloadThreads how many
     * @return these options
     */
    public KvOptions onloadThreads(int onloadThreads) {
        this.onloadThreads = onloadThreads;
        return this;
    }

    /**
     * With {@link Offload#ON_EVICTION}: of how many percent of the pool the pages are kept free or stored already, so
     * that evicting those owners takes no copy. Default 12; 0: none are stored before they are evicted.
     *
     * @param aheadPercent how many percent
     * @return these options
     */
    public KvOptions aheadPercent(int aheadPercent) {
        this.aheadPercent = aheadPercent;
        return this;
    }

    /**
     * The version of the model; default: empty. Histories that another version has stored are never seen.
     *
     * @param modelVersion the version
     * @return these options
     */
    public KvOptions modelVersion(String modelVersion) {
        this.modelVersion = Objects.requireNonNull(modelVersion, "modelVersion");
        return this;
    }

    /**
     * Where histories go that the pool has no room for; default: nowhere. The cache keeps the store open.
     *
     * @param store the store; {@code null} = none
     * @return these options
     */
    public KvOptions store(Store store) {
        this.store = store;
        return this;
    }

    /** In the order that kv.c reads them. */
    long[] numbers() {
        return new long[] {layers, heads, headSize, pageSize, type, size.unit().number, size.value(), maxHistory,
                overlap, edited, offload, onloadInBackground, onloadThreads, aheadPercent, deviceId,
                store == null ? 0 : store.handle()};
    }

    byte[] modelVersionText() {
        return Native.textOrNull(modelVersion, "modelVersion");
    }
}
