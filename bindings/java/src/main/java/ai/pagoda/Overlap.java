package ai.pagoda;

/** What becomes of new tokens that are cached already. */
public enum Overlap {
    /** The request is refused. */
    REFUSE(0),
    /** They are cut off; {@link KvLease#owner} tells how many. */
    TRIM(1);

    final int number;

    Overlap(int number) {
        this.number = number;
    }
}
