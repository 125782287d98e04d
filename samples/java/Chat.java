// Talks with a language model: java Chat FOLDER [SEED]. Each line of the input is a message; the answer is printed as it is
// generated. The same seed gives the same answers.
//
// The generator keeps the keys and values of the session, so a turn costs what is new, however long the talk is.

import ai.pagoda.Choice;
import ai.pagoda.ContextEnd;
import ai.pagoda.GenerateRequest;
import ai.pagoda.GenerateResponse;
import ai.pagoda.Generator;
import ai.pagoda.Message;
import ai.pagoda.PagodaException;
import ai.pagoda.Token;
import ai.pagoda.TokenStream;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;

public final class Chat {
    public static void main(String[] arguments) {
        long seed = 0;
        try {
            if (arguments.length == 2) {
                seed = Long.parseUnsignedLong(arguments[1]);
            }
        } catch (NumberFormatException error) {
            arguments = new String[0];
        }
        if (arguments.length < 1 || arguments.length > 2) {
            System.err.println("usage: java Chat FOLDER [SEED]");
            System.exit(2);
        }
        try {
            chat(Path.of(arguments[0]), seed, new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8)),
                    new PrintStream(System.out, true, StandardCharsets.UTF_8));
        } catch (PagodaException | IOException error) {
            System.err.println(error.getMessage());
            System.exit(1);
        }
    }

    private static void chat(Path folder, long seed, BufferedReader in, PrintStream out) throws IOException {
        List<Message> messages = new ArrayList<>();
        try (Generator generator = Generator.open(folder)) {
            for (String line = in.readLine(); line != null; line = in.readLine()) {
                messages.add(new Message("user", line));
                GenerateRequest request = new GenerateRequest().messages(messages).maxNewTokens(200).temperature(0.2f)
                        .topP(0.9f).repetitionPenalty(1.1f).seed(seed).session("chat").contextEnd(ContextEnd.STOP);
                try (TokenStream stream = generator.stream(request)) {
                    for (Token token : stream) {
                        out.print(token.text());
                        out.flush();
                    }
                    GenerateResponse response = stream.response().join();
                    Choice answer = response.choices().get(0);
                    out.print("\n[" + answer.tokens().length + " tokens; " + response.cachedTokens()
                            + " of the prompt's " + response.promptTokens().length + " were cached; "
                            + answer.finishReason().name().toLowerCase(Locale.ROOT) + "]\n");
                    messages.add(new Message("assistant", answer.text()));
                }
            }
        }
    }
}
