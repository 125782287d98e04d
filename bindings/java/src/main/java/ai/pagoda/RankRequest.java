package ai.pagoda;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Objects;

/**
 * A request: score candidates for a user. Features go by their names in pagoda.json; each has one key for every event,
 * candidate or user, -1 for none. A request may be sent again, and be changed in between; it is for one thread at a
 * time.
 */
public final class RankRequest {
    private final long user;
    private long start = -1;
    private final Columns events = new Columns();
    private long[] eventTimes;
    private final Columns userKeys = new Columns();
    private final Columns candidates = new Columns();
    private long time = Native.UNSET;
    private long timeoutUs;
    private Cancel cancel;

    /**
     * A request with nothing in it.
     *
     * @param user the user
     */
    public RankRequest(long user) {
        this.user = user;
    }

    /**
     * Which event of the user's history is the first of those that are sent; if it is not said they are the whole
     * history, and the engine works out what of it is new.
     *
     * @param start its number; the first event of a history is 0
     * @return this request
     */
    public RankRequest start(long start) {
        this.start = Native.unsigned(start, "start");
        return this;
    }

    /**
     * The keys of one feature of the events, the earliest first. All features must be sent, each with as many keys;
     * none if there are no events.
     *
     * @param feature its name
     * @param keys the keys
     * @return this request
     */
    public RankRequest events(String feature, long... keys) {
        events.put(feature, keys);
        return this;
    }

    /**
     * When the events were, in seconds; needed only if the model has times.
     *
     * @param times a time for each event
     * @return this request
     */
    public RankRequest eventTimes(long... times) {
        this.eventTimes = Objects.requireNonNull(times, "times");
        return this;
    }

    /**
     * The key of one feature of the user. All must be sent, or none where {@link #start} is beyond 0: then they are
     * what they were.
     *
     * @param feature its name
     * @param key the key
     * @return this request
     */
    public RankRequest userKey(String feature, long key) {
        userKeys.put(feature, key);
        return this;
    }

    /**
     * The keys of one feature of the candidates. All features of items must be sent, each with as many keys.
     *
     * @param feature its name
     * @param keys the keys
     * @return this request
     */
    public RankRequest candidates(String feature, long... keys) {
        candidates.put(feature, keys);
        return this;
    }

    /**
     * The time of the request; if it is not said, now.
     *
     * @param seconds the time, in seconds
     * @return this request
     */
    public RankRequest time(long seconds) {
        this.time = seconds;
        return this;
    }

    /**
     * How long it may take; default: as long as it does. After that it ends with {@link Status#CANCELLED} at once.
     *
     * @param timeout how long, in whole microseconds, 292,000 years at the most; zero: as long as it does
     * @return this request
     */
    public RankRequest timeout(Duration timeout) {
        long us = Native.micros(timeout, "timeout");
        this.timeoutUs = us == 0 && !timeout.isZero() ? 1 : us;
        return this;
    }

    /**
     * Ends it before that. In {@link Engine#rankAsync} it stands in for the future's own cancel.
     *
     * @param cancel what ends it; {@code null} = nothing does
     * @return this request
     */
    public RankRequest cancel(Cancel cancel) {
        this.cancel = cancel;
        return this;
    }

    Cancel cancel() {
        return cancel;
    }

    Packed pack() {
        return new Packed(this);
    }

    /** One feature's keys. */
    private record Column(String name, long[] keys) {}

    /** Keys by feature. Locked, so that a request changed while it is sent never has C read beyond what was packed. */
    private static final class Columns {
        private final List<Column> all = new ArrayList<>();

        synchronized void put(String feature, long... keys) {
            Objects.requireNonNull(feature, "feature");
            Column column = new Column(feature, Objects.requireNonNull(keys, "keys"));
            for (int i = 0; i < all.size(); i++) {
                if (all.get(i).name().equals(feature)) {
                    all.set(i, column);
                    return;
                }
            }
            all.add(column);
        }

        synchronized List<Column> copy() {
            return List.copyOf(all);
        }
    }

    /** A request in the form that engine.c takes: counts and single numbers, then all keys, and all names. */
    static final class Packed {
        /** How many single numbers there are, before the keys. */
        static final int HEAD = 11;

        final int candidates;
        final long[] numbers;
        final byte[] names;

        private Packed(RankRequest from) {
            // All that is counted is copied first, and only the copies are looked at.
            List<Column> eventKeys = from.events.copy();
            long[] eventTimes = from.eventTimes;
            List<Column> userKeys = from.userKeys.copy();
            List<Column> candidateKeys = from.candidates.copy();
            int events = count(eventKeys, "event_keys");
            candidates = count(candidateKeys, "candidate_keys");
            if (eventTimes != null) {
                same(eventTimes.length, events, "event_times");
            }
            List<long[]> lists = new ArrayList<>();
            List<String> texts = new ArrayList<>();
            add(eventKeys, lists, texts);
            lists.add(eventTimes == null ? new long[0] : eventTimes);
            add(userKeys, lists, texts);
            add(candidateKeys, lists, texts);
            int size = HEAD;
            for (long[] list : lists) {
                size = Math.addExact(size, list.length);
            }
            long time = from.time;
            long[] head = {from.user, from.start, events, eventKeys.size(), eventTimes == null ? 0 : 1,
                    userKeys.size(), candidates, candidateKeys.size(), time == Native.UNSET ? 0 : 1, time,
                    from.timeoutUs};
            numbers = new long[size];
            System.arraycopy(head, 0, numbers, 0, HEAD);
            int at = HEAD;
            for (long[] list : lists) {
                System.arraycopy(list, 0, numbers, at, list.length);
                at += list.length;
            }
            names = Native.texts(texts, "features");
        }

        private static void add(List<Column> columns, List<long[]> lists, List<String> texts) {
            for (Column column : columns) {
                lists.add(column.keys());
                texts.add(column.name());
            }
        }

        /** How many keys each feature has. */
        private static int count(List<Column> columns, String what) {
            int count = columns.isEmpty() ? 0 : columns.get(0).keys().length;
            columns.forEach(column -> same(column.keys().length, count, what));
            return count;
        }

        private static void same(int size, int count, String what) {
            if (size != count) {
                throw new PagodaException(Status.INVALID_ARGUMENT, "request." + what + ": " + size + " and " + count
                        + " numbers: give each as many", "request." + what);
            }
        }
    }
}
