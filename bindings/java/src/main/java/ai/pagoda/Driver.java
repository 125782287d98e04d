package ai.pagoda;

/** What runs the steps of a generator. */
public enum Driver {
    /** A thread of the generator. */
    THREAD(0),
    /** The caller: {@link Generator#step} and {@link Generator#generate} run steps. */
    CALLER(1);

    final int number;

    Driver(int number) {
        this.number = number;
    }
}
