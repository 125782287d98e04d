package ai.pagoda;

/**
 * The largest batch that a CUDA graph has room for.
 *
 * @param users the maximum number of users; 1 or more
 * @param rows the maximum number of rows of all users together: new events and candidates; 1 or more
 * @param candidates the maximum number of candidates of all users together; 0: as many as rows
 * @param pages the maximum number of pages of all users together; 0: enough for the longest histories
 */
public record GraphShape(int users, int rows, int candidates, int pages) {
    /**
     * A shape with as many candidates as rows, and enough pages for the longest histories.
     *
     * @param users the maximum number of users
     * @param rows the maximum number of rows
     */
    public GraphShape(int users, int rows) {
        this(users, rows, 0, 0);
    }
}
