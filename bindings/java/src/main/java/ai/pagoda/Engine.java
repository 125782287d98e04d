package ai.pagoda;

import java.lang.ref.Reference;
import java.nio.file.Path;
import java.util.List;
import java.util.Objects;
import java.util.concurrent.CompletableFuture;
import java.util.function.IntSupplier;

/**
 * A ranking engine: an open model folder with its embedding tables and the keys and values of its users. Closing it
 * answers the queued requests first, and waits for that.
 */
public final class Engine extends NativeObject {
    static {
        Native.load();
    }

    private Engine(long handle) {
        super(handle, Engine::free);
    }

    /**
     * Opens a model folder with the default options.
     *
     * @param folder the folder
     * @return the engine
     */
    public static Engine open(Path folder) {
        return open(folder, new EngineOptions());
    }

    /**
     * Opens a model folder, checks all its files, and runs the model once.
     *
     * @param folder the folder
     * @param options how
     * @return the engine
     */
    public static Engine open(Path folder, EngineOptions options) {
        Pagoda.outsideHandler();
        byte[] text = Native.text(Objects.requireNonNull(folder, "folder").toString(), "folder");
        ModelOptions model = Objects.requireNonNull(options, "options").model();
        try {
            return new Engine(open(text, options.numbers(), model.numbers(), model.onnxruntimeText(),
                    model.profileText(), options.cudaGraphNumbers(), options.tableTiersText(),
                    options.storeText(), options.storeOptions().numbers()));
        } finally {
            Reference.reachabilityFence(model);
        }
    }

    /**
     * Scores candidates, and waits for the result. Requests of concurrent threads may run in one batch. If a swap
     * changes the number of tasks meanwhile, the new model answers.
     *
     * @param request what is asked
     * @return the scores, and how it went
     */
    public RankResponse rank(RankRequest request) {
        return rank(request, this::tasks);
    }

    /** The same with another way to ask for the number of tasks. */
    RankResponse rank(RankRequest request, IntSupplier tasks) {
        RankRequest.Packed packed = request.pack();
        long[] response = new long[RankResponse.FIELDS];
        Cancel cancel = request.cancel();
        try {
            for (;;) {
                float[] scores = new float[Math.multiplyExact(packed.candidates, tasks.getAsInt())];
                try {
                    byte[] version = rank(handle(), packed.numbers, packed.names, cancel == null ? 0 : cancel.handle(),
                            scores, response);
                    return new RankResponse(scores, response, version);
                } catch (PagodaException error) {
                    // A swap has changed the number of tasks since it was read.
                    if (!error.argument().equals("score_count")) {
                        throw error;
                    }
                }
            }
        } finally {
            Reference.reachabilityFence(cancel);
        }
    }

    /**
     * Starts to score candidates on a thread of Pagoda, and returns at once. An error in the request itself is thrown
     * at once. When this returns, the request may be changed.
     *
     * @param request what is asked
     * @return what {@link #rank} returns or throws; to cancel it ends the request, unless that has a cancel of its own,
     *     which then does so alone
     */
    public CompletableFuture<RankResponse> rankAsync(RankRequest request) {
        RankRequest.Packed packed = request.pack();
        Cancel cancel = request.cancel();
        long handle = handle();
        Ranking ranking = new Ranking(cancel);
        try {
            return ranking.start(
                    () -> rankAsync(handle, packed.numbers, packed.names, ranking.cancelHandle(), ranking));
        } finally {
            Reference.reachabilityFence(cancel);
        }
    }

    /**
     * Replaces the model folder that is served. Requests that arrived before are answered by the old model, and no
     * request fails. On an exception the old folder stays.
     *
     * @param folder the folder
     */
    public void swap(Path folder) {
        Pagoda.outsideHandler();
        swap(handle(), Native.text(Objects.requireNonNull(folder, "folder").toString(), "folder"));
    }

    /**
     * Removes all data of users: their events, and their keys and values in the version that is served, also in the
     * store.
     *
     * @param users the users
     * @return how many were known
     */
    public long forget(long... users) {
        return forget(handle(), Objects.requireNonNull(users, "users"));
    }

    /**
     * Starts to load the keys and values of users from host memory and the store into the pool, and returns at once.
     *
     * @param users the users
     * @return how many histories are being loaded
     */
    public long prefetch(long... users) {
        return prefetch(handle(), Objects.requireNonNull(users, "users"));
    }

    /**
     * Evicts the keys and values of users from the pool to host memory and the store. Without either they are lost.
     *
     * @param users the users
     * @return how many users had any in the pool
     */
    public long unload(long... users) {
        return unload(handle(), Objects.requireNonNull(users, "users"));
    }

    /**
     * Where the model that is served runs.
     *
     * @return the provider, the GPU, and why
     */
    public EngineProvider provider() {
        long[] where = new long[2];
        String reason = Native.string(provider(handle(), where));
        return new EngineProvider(Provider.of((int) where[0]), (int) where[1], reason);
    }

    /**
     * The names of the embedding tables that have statistics.
     *
     * @return the names; none if the tables are in the graph
     */
    public List<String> tables() {
        String names = Native.string(tables(handle()));
        return names.isEmpty() ? List.of() : List.of(names.split("\n"));
    }

    /**
     * The statistics of the cache of keys and values.
     *
     * @return the statistics; {@link KvStats#pages} is 0 if nothing is cached
     */
    public KvStats kvStats() {
        return KvStats.of(kvStats(handle()));
    }

    /**
     * The statistics of an embedding table.
     *
     * @param table its name in pagoda.json
     * @return the statistics
     */
    public TableStats tableStats(String table) {
        return TableStats.of(tableStats(handle(), Native.text(table, "table")));
    }

    /**
     * The number of scores of a candidate.
     *
     * @return the number
     */
    public int tasks() {
        return Math.toIntExact(tasks(handle()));
    }

    /**
     * The pagoda.json of the model that is served: its features, tasks, limits and version.
     *
     * @return the JSON
     */
    public String info() {
        return Native.string(info(handle()));
    }

    /**
     * The state and the counters of the engine.
     *
     * @return the numbers
     */
    public EngineStats stats() {
        return EngineStats.of(stats(handle()));
    }

    /** A request under way. */
    static final class Ranking extends Pending<RankResponse> {
        Ranking(Cancel cancel) {
            super(cancel);
        }

        /** Called by the native part, on a thread of Pagoda's. */
        void done(Throwable error, float[] scores, long[] response, byte[] version) {
            try {
                ended(error, error == null ? new RankResponse(scores, response, version) : null,
                        ranked -> {});
            } catch (Throwable failure) {
                failed(failure);
            }
        }
    }

    private static native long open(byte[] folder, long[] numbers, long[] model, byte[] onnxruntime, byte[] profile,
            long[] cudaGraphs, byte[] tableTiers, byte[] store, long[] storeNumbers);

    /** Returns the version of the model. */
    private native byte[] rank(long handle, long[] numbers, byte[] names, long cancel, float[] scores, long[] response);

    private native void rankAsync(long handle, long[] numbers, byte[] names, long cancel, Ranking ranking);

    private native void swap(long handle, byte[] folder);

    private native long forget(long handle, long[] users);

    private native long prefetch(long handle, long[] users);

    private native long unload(long handle, long[] users);

    private native byte[] provider(long handle, long[] where);

    private native byte[] tables(long handle);

    private native long[] kvStats(long handle);

    private native long[] tableStats(long handle, byte[] table);

    private native long tasks(long handle);

    private native byte[] info(long handle);

    private native long[] stats(long handle);

    private static native void free(long handle);
}
