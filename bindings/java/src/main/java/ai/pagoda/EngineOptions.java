package ai.pagoda;

import java.nio.file.Path;
import java.time.Duration;
import java.util.Objects;

/** How to open an engine. What is not set stays at its default. */
public final class EngineOptions {
    private long instances = Native.UNSET;
    private long maxBatch = Native.UNSET;
    private long maxBatchRows = Native.UNSET;
    private long queue = Native.UNSET;
    private long kvPages = Native.UNSET;
    private long offload = Native.UNSET;
    private long aheadPercent = Native.UNSET;
    private long kvBytes = Native.UNSET;
    private long maxDelayUs = Native.UNSET;
    private long rememberBytes = Native.UNSET;
    private long tableCacheBytes = Native.UNSET;
    private long hostBytes = Native.UNSET;
    private long kvPercent = Native.UNSET;
    private String cudaGraphs;
    private ModelOptions model = new ModelOptions();
    private Path store;
    private StoreOptions storeOptions = new StoreOptions();

    /** The defaults. */
    public EngineOptions() {}

    /**
     * How many batches run at the same time, on one set of weights, tables and caches; 1 to 256, default 1.
     *
     * @param instances how many
     * @return these options
     */
    public EngineOptions instances(int instances) {
        this.instances = instances;
        return this;
    }

    /**
     * The most requests of one batch; default 64.
     *
     * @param maxBatch how many
     * @return these options
     */
    public EngineOptions maxBatch(int maxBatch) {
        this.maxBatch = maxBatch;
        return this;
    }

    /**
     * The most rows of one batch: new events, and candidates; default 8192. A request that alone has more runs alone.
     *
     * @param maxBatchRows how many
     * @return these options
     */
    public EngineOptions maxBatchRows(int maxBatchRows) {
        this.maxBatchRows = maxBatchRows;
        return this;
    }

    /**
     * The most requests that wait; more are refused with {@link Status#CAPACITY}. Default 4096.
     *
     * @param queue how many
     * @return these options
     */
    public EngineOptions queue(int queue) {
        this.queue = queue;
        return this;
    }

    /**
     * How many pages of keys and values are kept in memory, instead of {@link #kvBytes}; default 0: that says it.
     *
     * @param kvPages how many
     * @return these options
     */
    public EngineOptions kvPages(int kvPages) {
        this.kvPages = kvPages;
        return this;
    }

    /**
     * With a model on a GPU: how many percent of the memory that is free there are for keys and values, instead of
     * {@link #kvBytes}; default 0: that says it. Refused where the model runs on the CPU.
     *
     * @param kvPercent how many
     * @return these options
     */
    public EngineOptions kvPercent(int kvPercent) {
        this.kvPercent = kvPercent;
        return this;
    }

    /**
     * Bytes of host memory for keys and values that have left the pool, pinned where the model can be on a GPU; default
     * 0: none.
     *
     * @param hostBytes how many
     * @return these options
     */
    public EngineOptions hostBytes(long hostBytes) {
        this.hostBytes = Native.unsigned(hostBytes, "hostBytes");
        return this;
    }

    /**
     * On a GPU: shapes of batches that are captured into CUDA graphs when first used and replayed from then on;
     * default: none. They are separated by commas, each the most users, the most rows, and, if they are fewer, the
     * most candidates: {@code "1x384, 8x3072x2048"}. Every node of the model has to be on the GPU.
     *
     * @param cudaGraphs the shapes
     * @return these options
     */
    public EngineOptions cudaGraphs(String cudaGraphs) {
        this.cudaGraphs = Objects.requireNonNull(cudaGraphs, "cudaGraphs");
        return this;
    }

    /**
     * When keys and values go to the store; default {@link Offload#ON_EVICTION}.
     *
     * @param offload when
     * @return these options
     */
    public EngineOptions offload(Offload offload) {
        this.offload = Objects.requireNonNull(offload, "offload").number;
        return this;
    }

    /**
     * As {@link KvOptions#aheadPercent}; default 12.
     *
     * @param aheadPercent how many percent
     * @return these options
     */
    public EngineOptions aheadPercent(int aheadPercent) {
        this.aheadPercent = aheadPercent;
        return this;
    }

    /**
     * How many bytes of keys and values are kept in memory; default 1 GiB. With 0, and 0 pages, every request computes
     * its whole history.
     *
     * @param kvBytes how many
     * @return these options
     */
    public EngineOptions kvBytes(long kvBytes) {
        this.kvBytes = Native.unsigned(kvBytes, "kvBytes");
        return this;
    }

    /**
     * How long a request waits for others to run with; default: not at all. Then requests run together that came while
     * all instances were busy.
     *
     * @param maxDelay how long, in whole microseconds
     * @return these options
     */
    public EngineOptions maxDelay(Duration maxDelay) {
        this.maxDelayUs = Native.micros(maxDelay, "maxDelay");
        return this;
    }

    /**
     * Bytes for the events of users as they were sent, so that requests with only new events are served also when the
     * keys and values of the earlier ones are gone; default 64 MiB. 0: none are remembered.
     *
     * @param rememberBytes how many
     * @return these options
     */
    public EngineOptions rememberBytes(long rememberBytes) {
        this.rememberBytes = Native.unsigned(rememberBytes, "rememberBytes");
        return this;
    }

    /**
     * Bytes for the cache of each embedding table; default 0: all of a table of up to 256 MiB, and that much of a
     * larger one.
     *
     * @param tableCacheBytes how many
     * @return these options
     */
    public EngineOptions tableCacheBytes(long tableCacheBytes) {
        this.tableCacheBytes = Native.unsigned(tableCacheBytes, "tableCacheBytes");
        return this;
    }

    /**
     * Where the model runs, and on how many threads.
     *
     * @param model how; it must not name tables, which are the engine's own
     * @return these options
     */
    public EngineOptions model(ModelOptions model) {
        this.model = Objects.requireNonNull(model, "model");
        return this;
    }

    /**
     * The folder of a store for keys and values; default: none. One process has it open at a time.
     *
     * @param folder the folder
     * @param options how the store behaves
     * @return these options
     */
    public EngineOptions store(Path folder, StoreOptions options) {
        this.store = Objects.requireNonNull(folder, "folder");
        this.storeOptions = Objects.requireNonNull(options, "options");
        return this;
    }

    /** In the order that engine.c reads them. */
    long[] numbers() {
        // To C two of them together are a contradiction, and the bytes have a default.
        long bytes = (kvPages > 0 || kvPercent > 0) && kvBytes == Native.UNSET ? 0 : kvBytes;
        return new long[] {instances, maxBatch, maxBatchRows, queue, kvPages, offload, aheadPercent, bytes, maxDelayUs,
                rememberBytes, tableCacheBytes, hostBytes, kvPercent};
    }

    byte[] cudaGraphsText() {
        return Native.textOrNull(cudaGraphs, "cudaGraphs");
    }

    ModelOptions model() {
        return model;
    }

    byte[] storeText() {
        return store == null ? null : Native.text(store.toString(), "store");
    }

    StoreOptions storeOptions() {
        return storeOptions;
    }
}
