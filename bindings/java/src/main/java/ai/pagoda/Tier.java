package ai.pagoda;

/** Where an owner's history lies. */
public enum Tier {
    /** Nowhere. */
    NONE(0),
    /** In the pool. */
    RESIDENT(1),
    /** In the store, or on its way from there to the pool. */
    STORE(2),
    /** Somewhere that this version does not know. */
    UNKNOWN(-1);

    final int number;

    Tier(int number) {
        this.number = number;
    }

    static Tier of(int number) {
        return number >= 0 && number < UNKNOWN.ordinal() ? values()[number] : UNKNOWN;
    }
}
