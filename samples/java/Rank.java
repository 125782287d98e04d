// Ranks movies for a returning user: java Rank FOLDER, with a folder that samples/movielens/prepare.py has made.
// It holds model/, and visits.txt: what the user did at each visit, and the candidates. A visit sends only what is new.

import ai.pagoda.Engine;
import ai.pagoda.PagodaException;
import ai.pagoda.RankRequest;
import ai.pagoda.RankResponse;
import java.io.IOException;
import java.io.PrintStream;
import java.math.BigDecimal;
import java.math.RoundingMode;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Locale;
import java.util.NoSuchElementException;
import java.util.Scanner;
import java.util.stream.IntStream;

public final class Rank {
    /** What visits.txt says; a visit is its movies and its ratings. */
    private record Visits(long user, List<long[][]> visits, long[] candidates, String[] titles) {}

    public static void main(String[] arguments) {
        if (arguments.length != 1) {
            System.err.println("usage: java Rank FOLDER");
            System.exit(2);
        }
        try {
            Path folder = Path.of(arguments[0]);
            rank(folder.resolve("model"), read(folder.resolve("visits.txt")),
                    new PrintStream(System.out, true, StandardCharsets.UTF_8));
        } catch (PagodaException | IOException error) {
            System.err.println(error.getMessage());
            System.exit(1);
        }
    }

    private static void rank(Path model, Visits all, PrintStream out) {
        try (Engine engine = Engine.open(model)) {
            out.print("User " + all.user + "\n");
            float[] scores = {};
            int tasks = engine.tasks();
            long sent = 0;
            for (int visit = 0; visit < all.visits.size(); visit++) {
                long[][] events = all.visits.get(visit);
                RankResponse ranked = engine.rank(new RankRequest(all.user).start(sent)
                        .events("movie", events[0]).events("rating", events[1])
                        .candidates("movie", all.candidates));
                out.printf(Locale.ROOT, "  visit %d: %d new events, %d rows remembered, %d computed\n", visit + 1,
                        events[0].length, ranked.cachedRows(), ranked.computedRows());
                sent += events[0].length;
                scores = ranked.scores();
            }
            float[] last = scores;
            List<Integer> best = IntStream.range(0, last.length / tasks).boxed()
                    .sorted(Comparator.comparingDouble(candidate -> -last[candidate * tasks])).limit(10).toList();
            out.print("Top ten of " + all.candidates.length + " movies:\n");
            for (int place = 0; place < best.size(); place++) {
                // Java's own %.6f rounds a tie up, and C's to the even digit.
                BigDecimal score = new BigDecimal(last[best.get(place) * tasks]).setScale(6, RoundingMode.HALF_EVEN);
                out.printf(Locale.ROOT, "  %2d. %.6f  %s\n", place + 1, score, all.titles[best.get(place)]);
            }
        }
    }

    private static Visits read(Path path) throws IOException {
        try (Scanner in = new Scanner(path, StandardCharsets.UTF_8)) {
            long user = in.useLocale(Locale.ROOT).skip("user").nextLong();
            List<long[][]> visits = new ArrayList<>();
            for (; in.hasNext("visit"); visits.add(visit(in))) {
                in.next();
            }
            in.next("candidates");
            long[] candidates = new long[in.nextInt()];
            String[] titles = new String[candidates.length];
            for (int i = 0; i < candidates.length; i++) {
                candidates[i] = in.nextLong();
                titles[i] = in.nextLine().substring(1);
            }
            return new Visits(user, visits, candidates, titles);
        } catch (NoSuchElementException | IOException error) {
            throw new IOException(path + " can not be read: make it with samples/movielens/prepare.py (" + error + ")");
        }
    }

    private static long[][] visit(Scanner in) {
        long[][] events = new long[2][in.nextInt()];
        for (int i = 0; i < events[0].length; i++) {
            events[0][i] = in.nextLong();
            events[1][i] = in.nextLong();
        }
        return events;
    }
}
