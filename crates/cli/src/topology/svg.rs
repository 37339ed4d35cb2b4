//! A picture as SVG: rectangles, lines and text. Nothing in a text is markup.

use std::fmt::Write;

use crate::output::escaped;

/// What a rectangle is drawn in: the colour of its inside and of its border.
#[derive(Clone, Copy)]
pub(super) struct Paint {
    pub(super) fill: &'static str,
    pub(super) border: &'static str,
}

/// A rectangle, in pixels.
#[derive(Clone, Copy)]
pub(super) struct Area {
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) width: u32,
    pub(super) height: u32,
}

/// How a text is written.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum Style {
    Title,
    Strong,
    Plain,
    Small,
}

impl Style {
    fn attributes(self) -> &'static str {
        match self {
            Self::Title => "font-size=\"18\" font-weight=\"600\"",
            Self::Strong => "font-size=\"13\" font-weight=\"600\"",
            Self::Plain => "font-size=\"12\"",
            Self::Small => "font-size=\"11\" fill=\"#5b6470\"",
        }
    }

    /// About the width of a character: fonts differ.
    fn character_width(self) -> u32 {
        match self {
            Self::Title => 11,
            Self::Strong => 8,
            Self::Plain | Self::Small => 7,
        }
    }
}

/// Where a text is at its position.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(super) enum Anchor {
    Start,
    Middle,
}

/// A picture that grows.
#[derive(Default)]
pub(super) struct Picture {
    body: String,
}

impl Picture {
    /// A rectangle, and what it says of itself where a pointer rests on it.
    pub(super) fn rectangle(&mut self, area: Area, paint: Paint, tip: &str) {
        let Area { x, y, width, height } = area;
        let Paint { fill, border } = paint;
        let tip = match tip {
            "" => String::new(),
            tip => format!("<title>{}</title>", markup(tip)),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            self.body,
            "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"4\" \
             fill=\"{fill}\" stroke=\"{border}\">{tip}</rect>"
        );
    }

    /// A vertical line.
    pub(super) fn vertical(&mut self, x: u32, from: u32, to: u32) {
        let _ = writeln!(
            self.body,
            "<line x1=\"{x}\" y1=\"{from}\" x2=\"{x}\" y2=\"{to}\" stroke=\"#8a94a3\"/>"
        );
    }

    /// A text on the base line `y`, cut where it is wider than `width`.
    pub(super) fn text(
        &mut self,
        (x, y): (u32, u32),
        width: u32,
        text: &str,
        style: Style,
        anchor: Anchor,
    ) {
        let text = markup(&cut(&escaped(text), (width / style.character_width()) as usize));
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
        };
        let style = style.attributes();
        let _ = writeln!(self.body, "<text x=\"{x}\" y=\"{y}\" {style}{anchor}>{text}</text>");
    }

    /// The document, of this size.
    pub(super) fn finish(self, title: &str, width: u32, height: u32) -> String {
        let title = markup(title);
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
             <svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" role=\"img\" \
             font-family=\"system-ui, 'DejaVu Sans', sans-serif\" fill=\"#1d2430\">\n\
             <title>{title}</title>\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n\
             {}</svg>\n",
            self.body
        )
    }
}

/// The text with at most so many characters; an ellipsis stands for the rest.
fn cut(text: &str, characters: usize) -> String {
    if text.chars().count() <= characters {
        return text.to_owned();
    }
    let mut cut: String = text.chars().take(characters.saturating_sub(1)).collect();
    cut.push('\u{2026}');
    cut
}

/// A text as XML has it. What acts on a terminal is written out, so a document has no character that
/// XML forbids but two, which are left out (XML 1.0, 2.2).
fn markup(text: &str) -> String {
    let mut markup = String::with_capacity(text.len());
    for char in escaped(text).chars() {
        match char {
            '<' => markup.push_str("&lt;"),
            '>' => markup.push_str("&gt;"),
            '&' => markup.push_str("&amp;"),
            '"' => markup.push_str("&quot;"),
            '\u{fffe}' | '\u{ffff}' => {}
            char => markup.push(char),
        }
    }
    markup
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_is_markup() {
        let name = "</text><script>\"&\u{1b}\u{202e}\u{fffe}\n";
        let mut picture = Picture::default();
        let paint = Paint { fill: "#fff", border: "#000" };
        picture.rectangle(Area { x: 0, y: 0, width: 1, height: 1 }, paint, name);
        picture.text((0, 0), 1000, name, Style::Plain, Anchor::Start);
        let document = picture.finish(name, 1, 1);
        let expected = "&lt;/text&gt;&lt;script&gt;&quot;&amp;\\x1b\\u{202e}\\n";
        assert_eq!(document.matches(expected).count(), 3, "{document}");
        assert!(!document.contains("<script") && !document.contains('\u{1b}'), "{document}");
    }

    #[test]
    fn long_texts_are_cut() {
        assert_eq!(cut("mlx5_0", 6), "mlx5_0");
        assert_eq!(cut("mlx5_10", 6), "mlx5_\u{2026}");
        assert_eq!(cut("mlx5_10", 0), "\u{2026}");
    }
}
