package ai.pagoda;

/**
 * What a store has now, and what happened since it was opened.
 *
 * @param owners owners stored, of all models
 * @param records pieces of their histories
 * @param liveBytes bytes of the files that are in use
 * @param fileBytes bytes of all files
 * @param segments files
 * @param queuedBytes bytes that wait to be written
 * @param writes records written, removals too
 * @param writtenBytes bytes written, those of compactions too
 * @param writeErrors times the disk failed to write
 * @param corruptRecords records whose data was damaged
 * @param tornTails unfinished writes found when the store was opened
 * @param damagedRegions places in files where records should have been and were not
 * @param droppedOwners owners that left because damage made it uncertain what is current
 * @param indexRebuilds 1 if the index had to be made anew when the store was opened
 * @param indexErrors times the index failed; it is not used again until the store is opened anew
 * @param evictedOwners owners that left to make room
 * @param compactedSegments files compacted
 */
public record StoreStats(long owners, long records, long liveBytes, long fileBytes, long segments, long queuedBytes,
        long writes, long writtenBytes, long writeErrors, long corruptRecords, long tornTails, long damagedRegions,
        long droppedOwners, long indexRebuilds, long indexErrors, long evictedOwners, long compactedSegments) {
    static StoreStats of(long[] n) {
        return new StoreStats(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13],
                n[14], n[15], n[16]);
    }
}
