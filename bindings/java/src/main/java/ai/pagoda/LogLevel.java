package ai.pagoda;

/** How much is logged. */
public enum LogLevel {
    /** Nothing. */
    OFF(0),
    /** What failed, above all where there is no caller to tell. */
    ERROR(1),
    /** What is likely not as the caller wants it, such as a model on the CPU where a GPU was hoped for. */
    WARN(2),
    /** What happens rarely and is good to know. */
    INFO(3),
    /** What helps to find a mistake, such as every error that a call returned. */
    DEBUG(4),
    /** Everything. */
    TRACE(5);

    final int number;

    LogLevel(int number) {
        this.number = number;
    }
}
