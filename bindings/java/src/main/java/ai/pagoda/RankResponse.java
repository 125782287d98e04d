package ai.pagoda;

import java.time.Duration;
import java.util.Arrays;

/** The answer to a request: a score for each candidate and task, and how it went. */
public final class RankResponse {
    private final int tasks;
    private final float[] scores;
    private final long[] response;
    private final String version;

    /** How many numbers a response of pagoda.h has. */
    static final int FIELDS = 6;

    /** The response has its fields in the order of pagoda.h. */
    RankResponse(float[] scores, long[] response, byte[] version) {
        this.tasks = Math.toIntExact(response[5]);
        this.scores = scores;
        this.response = response;
        this.version = Native.string(version);
    }

    /**
     * The number of candidates.
     *
     * @return the number
     */
    public int size() {
        return tasks == 0 ? 0 : scores.length / tasks;
    }

    /**
     * The number of scores of a candidate.
     *
     * @return the number
     */
    public int tasks() {
        return tasks;
    }

    /**
     * All scores: those of the first candidate in the order of the tasks, then those of the next.
     *
     * @return the scores, not a copy
     */
    public float[] scores() {
        return scores;
    }

    /**
     * The scores of one candidate.
     *
     * @param candidate which
     * @return a copy of them, in the order of the tasks
     */
    public float[] candidate(int candidate) {
        check(candidate, size(), "candidate");
        return Arrays.copyOfRange(scores, candidate * tasks, (candidate + 1) * tasks);
    }

    /**
     * One score.
     *
     * @param candidate of which candidate
     * @param task for which task
     * @return the score
     */
    public float score(int candidate, int task) {
        check(candidate, size(), "candidate");
        check(task, tasks, "task");
        return scores[candidate * tasks + task];
    }

    /**
     * The version of the model that answered.
     *
     * @return the version, as in its pagoda.json
     */
    public String version() {
        return version;
    }

    /**
     * The number of other requests in the same batch.
     *
     * @return the number
     */
    public int batchedWith() {
        return (int) response[0];
    }

    /**
     * Rows of the history that were cached.
     *
     * @return the number
     */
    public long cachedRows() {
        return response[1];
    }

    /**
     * Rows of the history that were computed.
     *
     * @return the number
     */
    public long computedRows() {
        return response[2];
    }

    /**
     * The time in the queue, until the batch was formed.
     *
     * @return the time
     */
    public Duration queueTime() {
        return Duration.ofNanos(response[3]);
    }

    /**
     * The time that ONNX Runtime ran.
     *
     * @return the time
     */
    public Duration runTime() {
        return Duration.ofNanos(response[4]);
    }

    private static void check(int index, int count, String name) {
        if (index < 0 || index >= count) {
            throw new IndexOutOfBoundsException(name + ": there is no number " + index + ", only 0 to " + (count - 1));
        }
    }
}
