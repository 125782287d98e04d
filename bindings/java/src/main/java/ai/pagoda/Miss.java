package ai.pagoda;

import java.time.Duration;

/** What a lookup does about keys that the cache does not have. */
public final class Miss {
    /** What the table's {@code hit_rate_threshold} says: below it as {@link #WAIT}, otherwise as {@link #DEFAULT}. */
    public static final Miss BY_HIT_RATE = new Miss(0, 0);
    /** The lookup waits for their rows from the backing tiers. */
    public static final Miss WAIT = new Miss(1, 0);
    /** They get the table's default vector, and are inserted in the background. */
    public static final Miss DEFAULT = new Miss(2, 0);

    final int number;
    final long limitUs;

    private Miss(int number, long limitUs) {
        this.number = number;
        this.limitUs = limitUs;
    }

    /**
     * They are fetched; those that have not arrived in time get the default vector, and are inserted when they arrive.
     *
     * @param limit how long is waited
     * @return what to hand to a lookup
     */
    public static Miss within(Duration limit) {
        return new Miss(3, Native.micros(limit, "limit"));
    }
}
