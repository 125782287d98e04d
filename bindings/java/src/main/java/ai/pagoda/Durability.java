package ai.pagoda;

/** When a write to a store counts as done. */
public enum Durability {
    /** When the disk has it: it survives a loss of power. */
    POWER(0),
    /** When the operating system has it: it survives the end of the process, but not a loss of power. */
    PROCESS(1),
    /** As soon as it is queued: what is queued is lost with the process. */
    NONE(2);

    final int number;

    Durability(int number) {
        this.number = number;
    }
}
