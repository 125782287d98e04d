package ai.pagoda;

import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.Objects;
import java.util.stream.LongStream;

/** How to open an engine. What is not set stays at its default. */
public final class EngineOptions {
    private long instances = Native.UNSET;
    private long maxBatch = Native.UNSET;
    private long maxBatchRows = Native.UNSET;
    private long queue = Native.UNSET;
    private KvSize kvSize = KvSize.DEFAULT;
    private long offload = Native.UNSET;
    private long aheadPercent = Native.UNSET;
    private long maxDelayUs = Native.UNSET;
    private long rememberBytes = Native.UNSET;
    private long tableCacheBytes = Native.UNSET;
    private long hostBytes = Native.UNSET;
    private long kvFormat = Native.UNSET;
    private List<GraphShape> cudaGraphs = List.of();
    private Path tableTiersPath;
    private ModelOptions model = new ModelOptions();
    private Path storePath;
    private StoreOptions storeOptions = new StoreOptions();

    /** The defaults. */
    public EngineOptions() {}

    /**
     * How many batches run at the same time; 1 to 256, default 1. They share the weights, the tables and the caches.
     *
     * @param instances how many
     * @return these options
     */
    public EngineOptions instances(int instances) {
        this.instances = instances;
        return this;
    }

    /**
     * The maximum number of requests in a batch; default 64.
     *
     * @param maxBatch how many
     * @return these options
     */
    public EngineOptions maxBatch(int maxBatch) {
        this.maxBatch = maxBatch;
        return this;
    }

    /**
     * The maximum number of rows in a batch: new events and candidates; default 8192. A request with more rows runs
     * alone.
     *
     * @param maxBatchRows how many
     * @return these options
     */
    public EngineOptions maxBatchRows(int maxBatchRows) {
        this.maxBatchRows = maxBatchRows;
        return this;
    }

    /**
     * The maximum number of queued requests; default 4096. A request beyond it is rejected with
     * {@link Status#CAPACITY}.
     *
     * @param queue how many
     * @return these options
     */
    public EngineOptions queue(int queue) {
        this.queue = queue;
        return this;
    }

    /**
     * The size of the pool of keys and values; default 1 GiB. With {@link KvSize#NONE} nothing is cached: every request
     * computes its whole history.
     *
     * @param kvSize the size
     * @return these options
     */
    public EngineOptions kvSize(KvSize kvSize) {
        this.kvSize = Objects.requireNonNull(kvSize, "kvSize");
        return this;
    }

    /**
     * Bytes of host memory for keys and values that were evicted from the pool; default 0: none. The memory is pinned
     * if the model can run on a GPU.
     *
     * @param hostBytes how many
     * @return these options
     */
    public EngineOptions hostBytes(long hostBytes) {
        this.hostBytes = Native.unsigned(hostBytes, "hostBytes");
        return this;
    }

    /**
     * How pages hold keys and values, in memory and in the store; default {@link KvFormat#DEFAULT}.
     *
     * @param kvFormat how
     * @return these options
     */
    public EngineOptions kvFormat(KvFormat kvFormat) {
        this.kvFormat = Objects.requireNonNull(kvFormat, "kvFormat").number;
        return this;
    }

    /**
     * On a GPU: the batch shapes that are captured into CUDA graphs when they are first used, and replayed after that;
     * default: none. Every node of the model must run on the GPU. On the CPU the shapes are checked and not used.
     *
     * @param cudaGraphs the shapes
     * @return these options
     */
    public EngineOptions cudaGraphs(GraphShape... cudaGraphs) {
        this.cudaGraphs = List.of(cudaGraphs);
        return this;
    }

    /**
     * When keys and values are written to the store; default {@link Offload#ON_EVICTION}.
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
     * The coalescing window: how long a request waits for other requests, to run in one batch with them; default: it
     * does not wait. A batch then has the requests that arrived while all instances were busy.
     *
     * @param maxDelay how long, in whole microseconds
     * @return these options
     */
    public EngineOptions maxDelay(Duration maxDelay) {
        this.maxDelayUs = Native.micros(maxDelay, "maxDelay");
        return this;
    }

    /**
     * Bytes for the event log, the events of users as they were sent; default 64 MiB, 0: none. With it, a request that
     * sends only new events is served even if the keys and values of the earlier events were evicted.
     *
     * @param rememberBytes how many
     * @return these options
     */
    public EngineOptions rememberBytes(long rememberBytes) {
        this.rememberBytes = Native.unsigned(rememberBytes, "rememberBytes");
        return this;
    }

    /**
     * Bytes for the cache of each embedding table; default 0: a table of up to 256 MiB is cached as a whole, a larger
     * one with 256 MiB.
     *
     * @param tableCacheBytes how many
     * @return these options
     */
    public EngineOptions tableCacheBytes(long tableCacheBytes) {
        this.tableCacheBytes = Native.unsigned(tableCacheBytes, "tableCacheBytes");
        return this;
    }

    /**
     * A configuration file (ps.json) that names the backing tiers of the embedding tables; default: host memory, with
     * all rows. The models in the file are ignored.
     *
     * @param tableTiersPath the file; {@code null} = the default
     * @return these options
     */
    public EngineOptions tableTiersPath(Path tableTiersPath) {
        this.tableTiersPath = tableTiersPath;
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
     * The folder of a store for keys and values; default: none. One process at a time has it open.
     *
     * @param storePath the folder; {@code null} = none
     * @return these options
     */
    public EngineOptions storePath(Path storePath) {
        this.storePath = storePath;
        return this;
    }

    /**
     * How the store is opened.
     *
     * @param storeOptions how
     * @return these options
     */
    public EngineOptions storeOptions(StoreOptions storeOptions) {
        this.storeOptions = Objects.requireNonNull(storeOptions, "storeOptions");
        return this;
    }

    /** In the order that engine.c reads them. */
    long[] numbers() {
        return new long[] {instances, maxBatch, maxBatchRows, queue, kvSize.unit().number, kvSize.value(), offload,
                aheadPercent, maxDelayUs, rememberBytes, tableCacheBytes, hostBytes, kvFormat};
    }

    /** Four numbers for each shape. */
    long[] cudaGraphNumbers() {
        return cudaGraphs.stream()
                .flatMapToLong(shape -> LongStream.of(shape.users(), shape.rows(), shape.candidates(), shape.pages()))
                .toArray();
    }

    byte[] tableTiersText() {
        return tableTiersPath == null ? null : Native.text(tableTiersPath.toString(), "tableTiersPath");
    }

    ModelOptions model() {
        return model;
    }

    byte[] storeText() {
        return storePath == null ? null : Native.text(storePath.toString(), "storePath");
    }

    StoreOptions storeOptions() {
        return storeOptions;
    }
}
