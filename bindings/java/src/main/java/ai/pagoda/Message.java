package ai.pagoda;

import java.util.List;
import java.util.Objects;

/**
 * A message of a chat.
 *
 * @param role who speaks: "system", "user", "assistant", or what else the model's chat template knows
 * @param content the text
 */
public record Message(String role, String content) {
    /**
     * A message.
     *
     * @param role who speaks
     * @param content the text
     */
    public Message {
        Objects.requireNonNull(role, "role");
        Objects.requireNonNull(content, "content");
    }

    /** Messages as JSON. */
    static String json(List<Message> messages) {
        StringBuilder json = new StringBuilder("[");
        for (Message message : messages) {
            json.append(json.length() > 1 ? "," : "").append("{\"role\":");
            add(json, message.role);
            json.append(",\"content\":");
            add(json, message.content);
            json.append('}');
        }
        return json.append(']').toString();
    }

    private static void add(StringBuilder json, String text) {
        json.append('"');
        for (int i = 0; i < text.length(); i++) {
            char c = text.charAt(i);
            if (c < 0x20) {
                json.append("\\u00").append(Character.forDigit(c >> 4, 16)).append(Character.forDigit(c & 15, 16));
            } else {
                json.append(c == '"' || c == '\\' ? "\\" : "").append(c);
            }
        }
        json.append('"');
    }
}
