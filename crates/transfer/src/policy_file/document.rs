//! A document as tables of keys with their lines, whether it was TOML or JSON.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use toml::de::{DeTable, DeValue};

use super::error::Fault;

/// A key of a table, its line, and its value.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: String,
    pub(super) line: usize,
    pub(super) value: Value,
}

/// What a key has.
#[derive(Debug)]
pub(super) enum Value {
    Table(Vec<Entry>),
    Text(String),
    /// A whole number from 0.
    Number(u64),
    List(Vec<Self>),
    Boolean(bool),
    /// What nothing in a policy file has.
    Other,
}

/// Where the lines of a text end.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(text.match_indices('\n').map(|(offset, _)| offset).collect())
    }

    /// The line of an offset, from 1.
    fn line(&self, offset: usize) -> usize {
        1 + self.0.partition_point(|&end| end < offset)
    }
}

/// Reads TOML.
pub(super) fn toml(text: &str) -> Result<Vec<Entry>, Fault> {
    let lines = Lines::of(text);
    let document = DeTable::parse(text).map_err(|error| {
        let offset = error.span().map_or(text.len(), |span| span.start);
        Fault::new(lines.line(offset), error.message())
    })?;
    Ok(of_table(&lines, document.get_ref()))
}

// The parser has a limit on how deep tables are.
fn of_table(lines: &Lines, table: &DeTable<'_>) -> Vec<Entry> {
    let entry = |(name, value): (&toml::Spanned<_>, &toml::Spanned<DeValue<'_>>)| {
        let key: &std::borrow::Cow<'_, str> = name.get_ref();
        let start = name.span().start;
        let line = lines.line(start);
        (start, Entry { key: key.to_string(), line, value: of_value(lines, value.get_ref()) })
    };
    // In the order of the file: the first rule counts.
    let mut entries: Vec<_> = table.iter().map(entry).collect();
    entries.sort_by_key(|(start, _)| *start);
    entries.into_iter().map(|(_, entry)| entry).collect()
}

fn of_value(lines: &Lines, value: &DeValue<'_>) -> Value {
    match value {
        DeValue::Table(table) => Value::Table(of_table(lines, table)),
        DeValue::String(value) => Value::Text(value.to_string()),
        DeValue::Integer(value) => value.to_string().parse().map_or(Value::Other, Value::Number),
        DeValue::Boolean(value) => Value::Boolean(*value),
        DeValue::Array(values) => {
            Value::List(values.iter().map(|value| of_value(lines, value.get_ref())).collect())
        }
        _ => Value::Other,
    }
}

/// Reads JSON.
pub(super) fn json(text: &str) -> Result<Vec<Entry>, Fault> {
    let (lines, last) = (Lines::of(text), Cell::new(0));
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let read = Reader { text, lines: &lines, last: &last }.deserialize(&mut deserializer);
    let value = read.and_then(|value| deserializer.end().map(|()| value)).map_err(|error| {
        // Its message ends in the place.
        let message = error.to_string();
        let what = message.split(" at line ").next().unwrap_or_default();
        Fault::new(error.line().max(1), what)
    })?;
    match value {
        Value::Table(entries) => Ok(entries),
        _ => Err(Fault::new(1, "a policy file in JSON is an object")),
    }
}

/// Reads a JSON value. Keys are borrowed from the text, and so have places there.
#[derive(Clone, Copy)]
struct Reader<'t> {
    text: &'t str,
    lines: &'t Lines,
    /// The offset of the last key.
    last: &'t Cell<usize>,
}

impl<'t> DeserializeSeed<'t> for Reader<'t> {
    type Value = Value;

    // The parser has a limit on how deep values are.
    fn deserialize<D: Deserializer<'t>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'t> Visitor<'t> for Reader<'t> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::Text(text.to_owned()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(Value::Number(number))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Value, E> {
        Ok(Value::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Value, E> {
        Ok(Value::Other)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Boolean(value))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Other)
    }

    fn visit_seq<A: SeqAccess<'t>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = list.next_element_seed(self)? {
            values.push(value);
        }
        Ok(Value::List(values))
    }

    fn visit_map<A: MapAccess<'t>>(self, mut map: A) -> Result<Value, A::Error> {
        let (mut entries, mut keys) = (Vec::new(), HashSet::new());
        while let Some(key) = map.next_key_seed(Key(self))? {
            if !keys.insert(key.clone()) {
                return Err(A::Error::custom(format!("duplicate key {key:?}")));
            }
            let line = self.lines.line(self.last.get());
            let value = map.next_value_seed(self)?;
            entries.push(Entry { key, line, value });
        }
        Ok(Value::Table(entries))
    }
}

/// Reads a key, and notes where it is. One with escapes is taken to be where the one before is.
struct Key<'t>(Reader<'t>);

impl<'t> DeserializeSeed<'t> for Key<'t> {
    type Value = String;

    fn deserialize<D: Deserializer<'t>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<'t> Visitor<'t> for Key<'t> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<String, E> {
        Ok(key.to_owned())
    }

    fn visit_borrowed_str<E>(self, key: &'t str) -> Result<String, E> {
        self.0.last.set(key.as_ptr().addr() - self.0.text.as_ptr().addr());
        Ok(key.to_owned())
    }
}
