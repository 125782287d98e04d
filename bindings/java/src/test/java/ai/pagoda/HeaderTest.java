package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.lang.reflect.Method;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;

/** include/pagoda.h is covered, and the numbers that the binding writes down are its numbers. */
class HeaderTest {
    private static final Path NATIVE = Support.ROOT.resolve("bindings/java/src/main/native");
    /** Functions that the native part does not call, with the reason. */
    private static final Map<String, String> LEFT_OUT =
            Map.of("pagoda_error_status", "the status that comes with every error is the same");

    private static final Map<String, Class<? extends Record>> STATISTICS = Map.of(
            "pagoda_store_stats", StoreStats.class, "pagoda_kv_stats", KvStats.class, "pagoda_table_stats", TableStats.class,
            "pagoda_engine_stats", EngineStats.class, "pagoda_generator_stats", GeneratorStats.class);

    private static String header() throws IOException {
        String text = Files.readString(Support.ROOT.resolve("include/pagoda.h"));
        return Pattern.compile("/\\*.*?\\*/", Pattern.DOTALL).matcher(text).replaceAll("");
    }

    private static Set<String> matches(String pattern, String text) {
        Set<String> found = new TreeSet<>();
        Matcher matcher = Pattern.compile(pattern, Pattern.MULTILINE).matcher(text);
        while (matcher.find()) {
            found.add(matcher.group(1));
        }
        return found;
    }

    @Test
    void everyFunctionIsCalled() throws IOException {
        Set<String> exported = matches("^\\w[\\w \\*]*?\\b(pagoda_\\w+)\\(", header());
        assertEquals(new TreeSet<>(Files.readAllLines(Support.ROOT.resolve("tests/exports.txt"))), exported);
        Set<String> missing = new TreeSet<>(exported);
        // One is handed on by its address.
        missing.removeAll(matches("\\b(pagoda_\\w+)[(,]", sources()));
        assertEquals(new TreeSet<>(LEFT_OUT.keySet()), missing);
    }

    private static String sources() throws IOException {
        StringBuilder sources = new StringBuilder();
        try (Stream<Path> files = Files.list(NATIVE)) {
            for (Path file : files.filter(path -> path.toString().endsWith(".c")).toList()) {
                sources.append(Files.readString(file));
            }
        }
        return sources.toString();
    }

    /** Those of statistics are looked at below. */
    @Test
    void everyFieldOfOptionsAndRequestsIsUsed() throws IOException {
        Set<String> used = matches("(?:\\.|->)(\\w+)", sources());
        Matcher struct = Pattern.compile("typedef struct \\{([^}]*)\\} (pagoda_\\w+);").matcher(header());
        Set<String> missing = new TreeSet<>();
        int structs = 0;
        for (; struct.find(); structs++) {
            if (!STATISTICS.containsKey(struct.group(2))) {
                for (String field : matches("(\\w+);", struct.group(1))) {
                    if (!Set.of("struct_size").contains(field) && !used.contains(field)) {
                        missing.add(struct.group(2) + "." + field);
                    }
                }
            }
        }
        assertEquals(Set.of(), missing);
        assertTrue(structs > 10, structs + " structs");
    }

    @Test
    void everyConstantHasItsNumber() throws Exception {
        Map<String, Integer> numbers = new TreeMap<>();
        Matcher matcher = Pattern.compile("^#define PAGODA_(\\w+) (\\d+)$", Pattern.MULTILINE).matcher(header());
        while (matcher.find()) {
            numbers.put(matcher.group(1), Integer.valueOf(matcher.group(2)));
        }
        assertEquals(Integer.valueOf(1), numbers.remove("ABI_VERSION"));
        Map<String, Integer> version = taken(numbers, "VERSION_");
        int major = version.get("MAJOR");
        int minor = version.get("MINOR");
        int patch = version.get("PATCH");
        assertEquals(major + "." + minor + "." + patch, Pagoda.version());
        assertEquals(major * 1_000_000 + minor * 1_000 + patch, Pagoda.versionNumber());
        Map<String, Class<? extends Enum<?>>> enums = new TreeMap<>(Map.of(
                "LOG_LEVEL_", LogLevel.class, "PROVIDER_", Provider.class, "OPTIMIZATION_", Optimization.class,
                "DURABILITY_", Durability.class, "OVERLAP_", Overlap.class, "EDITED_", Edited.class,
                "OFFLOAD_", Offload.class, "TIER_", Tier.class, "TIERS_", Tiers.class));
        enums.putAll(Map.of("COMBINER_", Combiner.class, "REACH_", Reach.class, "KV_SIZE_UNIT_", KvSizeUnit.class,
                "DRIVER_", Driver.class, "KV_FORMAT_", KvFormat.class, "CONTEXT_END_", ContextEnd.class,
                "FINISH_REASON_", FinishReason.class, "EARLY_STOP_", EarlyStop.class));
        for (Map.Entry<String, Class<? extends Enum<?>>> entry : enums.entrySet()) {
            Map<String, Integer> expected = taken(numbers, entry.getKey());
            Map<String, Integer> mine = new TreeMap<>();
            for (Enum<?> constant : entry.getValue().getEnumConstants()) {
                var number = entry.getValue().getDeclaredField("number");
                number.setAccessible(true);
                mine.put(constant.name(), number.getInt(constant));
            }
            mine.remove("UNKNOWN");
            assertEquals(expected, mine, entry.getKey());
        }
        Map<String, Integer> types = new TreeMap<>();
        Arrays.stream(ElementType.values()).forEach(type -> types.put(type.name(), type.number()));
        assertEquals(taken(numbers, "ELEMENT_TYPE_"), types);
        assertEquals(Map.of("BY_HIT_RATE", Miss.BY_HIT_RATE.number, "WAIT", Miss.WAIT.number,
                "DEFAULT", Miss.DEFAULT.number, "WITHIN", Miss.within(Duration.ZERO).number), taken(numbers, "MISS_"));
        // KvLease has a method for each.
        assertEquals(Map.of("ROW_OFFSETS", 0, "NUM_CANDIDATES", 1, "CACHED_LEN", 2, "PAGE_INDPTR", 3, "PAGE_IDS", 4),
                taken(numbers, "KV_TENSOR_"));
        Map<String, Integer> statuses = new TreeMap<>();
        Arrays.stream(Status.values()).forEach(status -> statuses.put(status.name(), status.number()));
        statuses.remove("UNKNOWN");
        assertEquals(taken(numbers, "STATUS_"), statuses);
        assertEquals(Map.of(), numbers);
    }

    /** The constants with a prefix, without it; they are gone from the map. */
    private static Map<String, Integer> taken(Map<String, Integer> numbers, String prefix) {
        Map<String, Integer> found = new TreeMap<>();
        for (String name : List.copyOf(numbers.keySet())) {
            if (name.startsWith(prefix)) {
                found.put(name.substring(prefix.length()), numbers.remove(name));
            }
        }
        return found;
    }

    /** A record of statistics takes as many numbers as its struct has. */
    @Test
    void statisticsHaveEveryField() throws Exception {
        for (Map.Entry<String, Class<? extends Record>> entry : STATISTICS.entrySet()) {
            Matcher body = Pattern.compile("typedef struct \\{([^}]*)\\} " + entry.getKey() + ";").matcher(header());
            assertTrue(body.find(), entry.getKey());
            List<String> fields = new ArrayList<>();
            Matcher field = Pattern.compile("u?int64_t (\\w+);").matcher(body.group(1));
            while (field.find()) {
                fields.add(field.group(1).replaceAll("_", ""));
            }
            List<String> mine = Arrays.stream(entry.getValue().getRecordComponents())
                    .map(component -> component.getName().toLowerCase(Locale.ROOT)).toList();
            assertEquals(fields, mine);
            long[] numbers = new long[fields.size()];
            Arrays.setAll(numbers, i -> i + 1);
            Method of = entry.getValue().getDeclaredMethod("of", long[].class);
            of.setAccessible(true);
            Object made = of.invoke(null, (Object) numbers);
            for (int i = 0; i < numbers.length; i++) {
                assertEquals(numbers[i], entry.getValue().getRecordComponents()[i].getAccessor().invoke(made));
            }
        }
    }
}
