//! The events of a YAML text, without what can make them many.

use std::borrow::Cow;
use std::path::Path;

use saphyr_parser::{Event, Parser, ScalarStyle, StrInput};

use super::{FileProblem, TopologyFileError};

/// The longest text of a file that an error repeats.
const SHOWN: usize = 64;

/// What comes next.
#[derive(Debug, PartialEq)]
pub(super) enum Item<'a> {
    /// A text, and whether it is without quotes.
    Scalar(Cow<'a, str>, bool),
    List,
    Map,
    /// The end of a list or of a map.
    End,
}

impl Item<'_> {
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Scalar(text, true) if text.is_empty() => "nothing",
            Self::Scalar(..) => "a text or a number",
            Self::List => "a list",
            Self::Map => "a map",
            Self::End => "the end",
        }
    }
}

/// Reads a text.
pub(super) struct Events<'a> {
    path: &'a Path,
    parser: Parser<'a, StrInput<'a>>,
    /// The line of the last event.
    pub(super) line: usize,
    /// Where in the network that is, for errors.
    pub(super) place: String,
}

impl<'a> Events<'a> {
    pub(super) fn new(path: &'a Path, text: &'a str) -> Self {
        Self { path, parser: Parser::new_from_str(text), line: 1, place: String::new() }
    }

    /// An error at the last event.
    pub(super) fn error(&self, problem: FileProblem) -> TopologyFileError {
        let (file, line, place) = (self.path.to_owned(), Some(self.line), self.place.clone());
        TopologyFileError { file, line, place, problem: Box::new(problem) }
    }

    /// What begins or ends next; `None` at the end of the text.
    pub(super) fn next(&mut self) -> Result<Option<Item<'a>>, TopologyFileError> {
        loop {
            let (event, span) = match self.parser.next_event() {
                None => return Ok(None),
                Some(Ok(next)) => next,
                Some(Err(error)) => {
                    self.line = error.marker().line();
                    return Err(self.error(FileProblem::Yaml(shown(error.info()))));
                }
            };
            self.line = span.start.line();
            let (item, anchor, tagged) = match event {
                Event::StreamEnd => return Ok(None),
                Event::Nothing
                | Event::StreamStart
                | Event::DocumentStart(_)
                | Event::DocumentEnd => {
                    continue;
                }
                Event::Alias(_) => return Err(self.error(FileProblem::Alias)),
                Event::Scalar(text, style, anchor, tag) => {
                    (Item::Scalar(text, style == ScalarStyle::Plain), anchor, tag.is_some())
                }
                Event::SequenceStart(anchor, tag) => (Item::List, anchor, tag.is_some()),
                Event::MappingStart(anchor, tag) => (Item::Map, anchor, tag.is_some()),
                Event::SequenceEnd | Event::MappingEnd => (Item::End, 0, false),
            };
            if anchor != 0 {
                return Err(self.error(FileProblem::Alias));
            }
            if tagged {
                return Err(self.error(FileProblem::Tag));
            }
            return Ok(Some(item));
        }
    }

    fn expect(
        &mut self,
        what: &str,
        expected: &'static str,
        is: impl Fn(&Item<'_>) -> bool,
    ) -> Result<Item<'a>, TopologyFileError> {
        match self.next()? {
            Some(item) if is(&item) => Ok(item),
            other => {
                let found = other.map_or("nothing", |item| item.kind());
                Err(self.error(FileProblem::Kind { what: what.to_owned(), expected, found }))
            }
        }
    }

    pub(super) fn map(&mut self, what: &str) -> Result<(), TopologyFileError> {
        self.expect(what, "a map", |item| *item == Item::Map).map(drop)
    }

    pub(super) fn list(&mut self, what: &str) -> Result<(), TopologyFileError> {
        self.expect(what, "a list", |item| *item == Item::List).map(drop)
    }

    /// Whether another map of a list follows, and not its end.
    pub(super) fn another(&mut self, what: &str) -> Result<bool, TopologyFileError> {
        let is = |item: &Item<'_>| matches!(item, Item::Map | Item::End);
        Ok(self.expect(what, "a map", is)? == Item::Map)
    }

    /// The next key of a map, one of `known`; `None` at its end.
    pub(super) fn key(
        &mut self,
        known: &[&'static str],
        seen: &mut u32,
    ) -> Result<Option<&'static str>, TopologyFileError> {
        let is = |item: &Item<'_>| matches!(item, Item::Scalar(..) | Item::End);
        let Item::Scalar(text, _) = self.expect("a key", "a word", is)? else { return Ok(None) };
        let Some(number) = known.iter().position(|key| *key == text) else {
            let known = known.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
            return Err(self.error(FileProblem::UnknownKey { key: shown(&text), known }));
        };
        if *seen & (1 << number) != 0 {
            return Err(self.error(FileProblem::DuplicateKey(known[number])));
        }
        *seen |= 1 << number;
        Ok(Some(known[number]))
    }

    /// The value of a key, by `parse`, which knows whether it is without quotes.
    pub(super) fn value<T>(
        &mut self,
        key: &'static str,
        expected: &'static str,
        parse: impl FnOnce(&str, bool) -> Option<T>,
    ) -> Result<T, TopologyFileError> {
        let is = |item: &Item<'_>| matches!(item, Item::Scalar(..));
        match self.expect(&format!("`{key}`"), expected, is)? {
            Item::Scalar(text, plain) => parse(&text, plain).ok_or_else(|| {
                let value = shown(&text);
                self.error(FileProblem::Value { key, value, expected })
            }),
            _ => Err(self.error(FileProblem::MissingKey(key))),
        }
    }
}

/// A text of the file, cut.
fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
