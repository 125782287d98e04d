package ai.pagoda;

import java.lang.ref.Reference;
import java.nio.file.Path;
import java.util.Objects;
import java.util.concurrent.CompletableFuture;

/**
 * A ranking engine: a model folder that is being served, with its tables and the keys and values of its users. Closing
 * it answers the requests that wait first, and waits for that.
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
                    model.profileText(), options.cudaGraphsText(), options.storeText(),
                    options.storeOptions().numbers()));
        } finally {
            Reference.reachabilityFence(model);
        }
    }

    /**
     * Scores candidates and waits for it. Requests of other threads that come at the same time may run together with
     * it.
     *
     * @param request what is asked
     * @return the scores, and how it went
     */
    public RankResponse rank(RankRequest request) {
        RankRequest.Packed packed = request.pack();
        long[] response = new long[5];
        Cancel cancel = request.cancel();
        try {
            for (;;) {
                int tasks = tasks();
                float[] scores = new float[Math.multiplyExact(packed.candidates, tasks)];
                try {
                    rank(handle(), packed.numbers, packed.names, cancel == null ? 0 : cancel.handle(), scores,
                            response);
                    return new RankResponse(tasks, scores, response);
                } catch (PagodaException error) {
                    // A swap may have changed the number of tasks since.
                    if (!error.argument().equals("score_count") || tasks() == tasks) {
                        throw error;
                    }
                }
            }
        } finally {
            Reference.reachabilityFence(cancel);
        }
    }

    /**
     * Has candidates scored on a thread of Pagoda's and returns at once. What is wrong with the request itself is
     * thrown at once. The request may be changed as soon as this returns.
     *
     * @param request what is asked
     * @return what {@link #rank} returns or throws; to cancel it ends the request, unless that has a cancel of its own,
     *     which then does so alone
     */
    public CompletableFuture<RankResponse> rankAsync(RankRequest request) {
        RankRequest.Packed packed = request.pack();
        Cancel cancel = request.cancel();
        long handle = handle();
        Ranking ranking = new Ranking(packed.candidates, cancel);
        try {
            return ranking.start(
                    () -> rankAsync(handle, packed.numbers, packed.names, ranking.cancelHandle(), ranking));
        } finally {
            Reference.reachabilityFence(cancel);
        }
    }

    /**
     * Serves another model folder from now on. Requests that came before end on the old one, and no request fails. On
     * an exception all stays as it was.
     *
     * @param folder the folder
     */
    public void swap(Path folder) {
        Pagoda.outsideHandler();
        swap(handle(), Native.text(Objects.requireNonNull(folder, "folder").toString(), "folder"));
    }

    /**
     * Forgets users: their events, and their keys and values in the version that is served now, also those in the
     * store.
     *
     * @param users the users
     * @return how many were known
     */
    public long forget(long... users) {
        return forget(handle(), Objects.requireNonNull(users, "users"));
    }

    /**
     * How many scores a candidate has.
     *
     * @return the number
     */
    public int tasks() {
        return Math.toIntExact(tasks(handle()));
    }

    /**
     * The pagoda.json of the model that is served now: its features, tasks, limits and version.
     *
     * @return the JSON
     */
    public String info() {
        return Native.string(info(handle()));
    }

    /**
     * What the engine did since it was opened.
     *
     * @return the numbers
     */
    public EngineStats stats() {
        return EngineStats.of(stats(handle()));
    }

    /** A request under way. */
    static final class Ranking extends Pending<RankResponse> {
        private final int candidates;

        Ranking(int candidates, Cancel cancel) {
            super(cancel);
            this.candidates = candidates;
        }

        /** Called by the native part, on a thread of Pagoda's. */
        void done(Throwable error, float[] scores, long[] response) {
            try {
                ended(error, error == null ? new RankResponse(scores.length / candidates, scores, response) : null,
                        ranked -> {});
            } catch (Throwable failure) {
                failed(failure);
            }
        }
    }

    private static native long open(byte[] folder, long[] numbers, long[] model, byte[] onnxruntime, byte[] profile,
            byte[] cudaGraphs, byte[] store, long[] storeNumbers);

    private native void rank(long handle, long[] numbers, byte[] names, long cancel, float[] scores, long[] response);

    private native void rankAsync(long handle, long[] numbers, byte[] names, long cancel, Ranking ranking);

    private native void swap(long handle, byte[] folder);

    private native long forget(long handle, long[] users);

    private native long tasks(long handle);

    private native byte[] info(long handle);

    private native long[] stats(long handle);

    private static native void free(long handle);
}
