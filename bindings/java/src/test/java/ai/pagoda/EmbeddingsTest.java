package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.LongBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class EmbeddingsTest extends Support {
    private static final String MODEL = "\"sparse_files\": [\".\"], \"embedding_table_names\": [\"t\"], "
            + "\"embedding_vecsize_per_table\": [2], \"default_value_for_each_table\": [[7, 8]], \"gpucacheper\": 1.0, "
            + "\"hit_rate_threshold\": 1.0}";

    /** Rows of two numbers, the key and its negative, for the keys 1 to 4; in HugeCTR's format. */
    private static Path table(Path folder) throws IOException {
        ByteBuffer keys = ByteBuffer.allocate(32).order(ByteOrder.LITTLE_ENDIAN);
        ByteBuffer rows = ByteBuffer.allocate(32).order(ByteOrder.LITTLE_ENDIAN);
        for (int key = 1; key <= 4; key++) {
            keys.putLong(key);
            rows.putFloat(key).putFloat(-key);
        }
        Files.write(folder.resolve("key"), keys.array());
        Files.write(folder.resolve("emb_vector"), rows.array());
        return Files.writeString(folder.resolve("ps.json"), "{\"models\": [{\"model\": \"m\", " + MODEL + "]}");
    }

    private static ByteBuffer direct(int bytes) {
        return ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
    }

    @Test
    void looksUpAndChanges(@TempDir Path folder) throws Exception {
        Path path = table(folder);
        assertTrue(Embeddings.estimate(path).memory() > 0);
        long[] keys = {2, 9, 2, 4};
        try (Embeddings tables = Embeddings.open(path)) {
            assertEquals(2, tables.dim("m/t"));
            EmbeddingRows rows = tables.lookup("t", keys, Miss.WAIT);
            assertArrayEquals(new float[] {2, -2, 7, 8, 2, -2, 4, -4}, rows.numbers());
            assertArrayEquals(new float[] {7, 8}, rows.row(1));
            assertTrue(rows.found(0) && !rows.found(1) && rows.found(3));
            assertEquals(4, rows.size());
            assertEquals(2, rows.dim());
            assertThrows(IndexOutOfBoundsException.class, () -> rows.row(4));
            assertArrayEquals(rows.numbers(), tables.lookup("t", keys, Miss.within(Duration.ofSeconds(5))).numbers());
            assertEquals(0, tables.lookup("t").size());
            float[] mean = {2, -2, 0, 0, (7f + 2 + 4) / 3, (8f - 2 - 4) / 3};
            assertArrayEquals(mean, tables.pool("t", keys, new long[] {0, 1, 1, 4}, Combiner.MEAN, Miss.BY_HIT_RATE)
                    .numbers());

            LongBuffer from = direct(48).asLongBuffer().position(1).put(keys).position(1).limit(5);
            FloatBuffer to = direct(64).asFloatBuffer().limit(8);
            ByteBuffer found = direct(4);
            tables.lookup("t", from, Miss.WAIT, to, found);
            assertEquals(FloatBuffer.wrap(rows.numbers()), to);
            assertEquals(ByteBuffer.wrap(new byte[] {1, 0, 1, 1}), found);
            tables.pool("t", from, new long[] {0, 1, 1, 4}, Combiner.MEAN, Miss.WAIT, to.limit(6), null);
            assertEquals(FloatBuffer.wrap(mean), to);

            tables.upsert("t", 1, new long[] {2}, new float[] {5, 5}, Reach.AT_ONCE);
            assertArrayEquals(new float[] {5, 5}, tables.lookup("t", 2).numbers());
            tables.delete("t", 2, new long[] {2}, Reach.AT_ONCE);
            assertFalse(tables.lookup("t", 2).found(0));
            tables.add("{\"model\": \"n\", " + MODEL, folder);
            assertTrue(tables.prefetch("n/t", keys) <= 3);
            tables.await();
            tables.refresh("n/t");
            assertTrue(tables.stats("t").lookups() >= 5);
            assertTrue(tables.stats("t").staleSeconds() < 0);
            tables.retire("n");
            fails(Status.NOT_FOUND, "table", () -> tables.dim("n/t"));
        }
    }

    @Test
    void servesTheTablesOfAModel(@TempDir Path folder) throws Exception {
        try (Embeddings tables = Embeddings.open(table(folder));
                Model model = Model.open(HELLO, cpu().tables(tables))) {
            assertEquals(1, model.inputs().size());
            tables.close();
            fails(Status.INVALID_HANDLE, "", () -> Model.open(HELLO, cpu().tables(tables)));
        }
    }

    @Test
    void misuseIsAnException(@TempDir Path folder) throws Exception {
        fails(Status.NOT_FOUND, "path", () -> Embeddings.open(folder.resolve("none.json")));
        fails(Status.NOT_FOUND, "path", () -> Embeddings.estimate(folder.resolve("none.json")));
        assertThrows(NullPointerException.class, () -> Embeddings.open(null));
        Embeddings tables = Embeddings.open(table(folder));
        fails(Status.NOT_FOUND, "table", () -> tables.lookup("u", 1));
        fails(Status.INVALID_ARGUMENT, "offsets",
                () -> tables.pool("t", new long[] {1, 2}, new long[] {0, 1}, Combiner.SUM, Miss.WAIT));
        fails(Status.INVALID_ARGUMENT, "number_count",
                () -> tables.upsert("t", 1, new long[] {1}, new float[] {1}, Reach.AT_ONCE));
        assertThrows(IllegalArgumentException.class, () -> tables.lookup("a\0b", 1));
        assertThrows(NullPointerException.class, () -> tables.lookup(null, 1));
        assertThrows(NullPointerException.class, () -> tables.lookup("t", (long[]) null));
        assertThrows(NullPointerException.class, () -> tables.lookup("t", new long[1], null));
        assertThrows(NullPointerException.class, () -> tables.pool("t", new long[1], null, Combiner.SUM, Miss.WAIT));
        assertThrows(NullPointerException.class, () -> tables.upsert("t", 1, null, new float[2], Reach.AT_ONCE));
        assertThrows(NullPointerException.class, () -> tables.delete("t", 1, new long[1], null));
        assertThrows(IllegalArgumentException.class, () -> Miss.within(Duration.ofSeconds(-1)));
        LongBuffer keys = direct(16).asLongBuffer();
        FloatBuffer rows = direct(16).asFloatBuffer();
        fails(Status.INVALID_ARGUMENT, "number_count",
                () -> tables.lookup("t", keys, Miss.WAIT, rows.duplicate().limit(3), null));
        fails(Status.INVALID_ARGUMENT, "found", () -> tables.lookup("t", keys, Miss.WAIT, rows, direct(1)));
        assertThrows(IllegalArgumentException.class,
                () -> tables.lookup("t", LongBuffer.allocate(2), Miss.WAIT, rows, null));
        assertThrows(IllegalArgumentException.class,
                () -> tables.lookup("t", keys, Miss.WAIT, rows.asReadOnlyBuffer(), null));
        assertThrows(IllegalArgumentException.class, () -> tables.lookup("t",
                ByteBuffer.allocateDirect(16).order(ByteOrder.BIG_ENDIAN).asLongBuffer(), Miss.WAIT, rows, null));
        tables.close();
        fails(Status.INVALID_HANDLE, "", () -> tables.lookup("t", 1));
        fails(Status.INVALID_HANDLE, "", () -> tables.lookup("t", keys, Miss.WAIT, rows, null));
        fails(Status.INVALID_HANDLE, "", tables::await);
        fails(Status.INVALID_HANDLE, "", () -> tables.stats("t"));
    }
}
