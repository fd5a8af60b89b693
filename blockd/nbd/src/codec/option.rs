//! Options' data and the replies to options, as bytes.

use super::super::{ExportInfo, Negotiated};
use super::{
    MAX_STRING_BYTES, OPTION_MAGIC, OPTION_REPLY_MAGIC, array_at, info, rep, u16_at, u32_at, u64_at,
};

/// Bytes of an option's header.
pub(super) const HEADER_BYTES: usize = 16;

/// The most queries in one option that are looked at.
pub(super) const MAX_QUERIES: u32 = 64;

/// An option, and how many bytes of data it announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: u32,
    pub(super) len: u32,
}

/// The header of an option; nothing if it isn't one.
pub(super) fn parse_header(bytes: &[u8]) -> Option<Header> {
    if u64_at(bytes, 0)? != OPTION_MAGIC {
        return None;
    }
    Some(Header { kind: u32_at(bytes, 8)?, len: u32_at(bytes, 12)? })
}

/// An error in an option's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed {
    pub(super) reply: u32,
    pub(super) message: &'static str,
}

fn invalid(message: &'static str) -> Malformed {
    Malformed { reply: rep::ERR_INVALID, message }
}

/// An export's name. Not empty names only: the empty one is the default export.
pub(super) fn name(bytes: &[u8]) -> Result<String, Malformed> {
    if bytes.len() > usize_from(MAX_STRING_BYTES) {
        return Err(Malformed { reply: rep::ERR_TOO_BIG, message: "the name is too long" });
    }
    match std::str::from_utf8(bytes) {
        Ok(name) if !name.contains('\0') => Ok(name.to_owned()),
        Ok(_) => Err(invalid("the name has a NUL in it")),
        Err(_) => Err(invalid("the name is not UTF-8")),
    }
}

/// Checks that a name of `name` bytes can be in an option of `len` bytes, of which `rest` are
/// needed for other fields. Called as soon as the length is known, so that the server does not wait
/// for bytes in vain.
pub(super) fn check_name_len(name: u32, len: u32, rest: u32) -> Result<(), Malformed> {
    if name > MAX_STRING_BYTES {
        return Err(Malformed { reply: rep::ERR_TOO_BIG, message: "the name is too long" });
    }
    if u64::from(name) + u64::from(rest) > u64::from(len) {
        return Err(invalid("the name goes past the option's end"));
    }
    Ok(())
}

/// The information that an INFO or GO requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) name: bool,
    pub(super) description: bool,
}

/// The data of INFO and GO after the name's length. Items that are not known are passed over;
/// the block sizes are always sent.
pub(super) fn parse_info(bytes: &[u8], name_len: u32) -> Result<(String, Wanted), Malformed> {
    let short = invalid("the option's data is too short");
    let (name_bytes, rest) = bytes.split_at_checked(usize_from(name_len)).ok_or(short)?;
    let count = u16_at(rest, 0).ok_or(short)?;
    let items = rest.get(2..).unwrap_or_default();
    if items.len() != 2 * usize::from(count) {
        return Err(invalid("the number of items is not that of the option's data"));
    }
    let mut wanted = Wanted::default();
    for item in items.as_chunks().0 {
        match u16::from_be_bytes(*item) {
            info::NAME => wanted.name = true,
            info::DESCRIPTION => wanted.description = true,
            _ => {}
        }
    }
    Ok((name(name_bytes)?, wanted))
}

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT after the name's length: the name, and the
/// queries. Queries that are no text match no context, and are skipped.
pub(super) fn parse_queries(bytes: &[u8], name_len: u32) -> Result<(String, Queries), Malformed> {
    let short = invalid("the option's data is too short");
    let (name_bytes, rest) = bytes.split_at_checked(usize_from(name_len)).ok_or(short)?;
    let count = u32_at(rest, 0).ok_or(short)?;
    let mut rest = rest.get(4..).unwrap_or_default();
    if u64::from(count) * 4 > u64::try_from(rest.len()).unwrap_or(0) {
        return Err(invalid("more queries than the option's data can hold"));
    }
    if count > MAX_QUERIES {
        return Err(Malformed { reply: rep::ERR_TOO_BIG, message: "too many queries" });
    }
    let mut queries = Queries { all: count == 0, list: Vec::new() };
    for _ in 0..count {
        let len = u32_at(rest, 0).ok_or(short)?;
        if len > MAX_STRING_BYTES {
            return Err(Malformed { reply: rep::ERR_TOO_BIG, message: "a query is too long" });
        }
        let after = rest.get(4..).unwrap_or_default();
        let (query, next) = after.split_at_checked(usize_from(len)).ok_or(short)?;
        queries.list.extend(std::str::from_utf8(query).ok().map(str::to_owned));
        rest = next;
    }
    if !rest.is_empty() {
        return Err(invalid("bytes after the last query"));
    }
    Ok((name(name_bytes)?, queries))
}

/// The metadata contexts that a client requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Queries {
    /// There is no query: to list, that means all; to select, none.
    all: bool,
    list: Vec<String>,
}

impl Queries {
    /// Whether a context is to be selected: only its whole name does.
    pub(super) fn select(&self, context: &str) -> bool {
        self.list.iter().any(|query| query == context)
    }

    /// Whether a context is to be listed: the beginning of its name up to a colon is enough.
    pub(super) fn list(&self, context: &str) -> bool {
        let begins = |query: &String| query.ends_with(':') && context.starts_with(query.as_str());
        self.all || self.select(context) || self.list.iter().any(begins)
    }
}

/// A reply to an option.
pub(super) fn reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[&[u8]]) {
    let len: usize = data.iter().map(|part| part.len()).sum();
    out.extend_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend_from_slice(&option.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&u32_from(len).to_be_bytes());
    for part in data {
        out.extend_from_slice(part);
    }
}

/// One export of a list.
pub(super) fn reply_server(out: &mut Vec<u8>, option: u32, export: &ExportInfo) {
    let name = string(&export.name);
    let len = u32_from(name.len()).to_be_bytes();
    reply(out, option, rep::SERVER, &[&len, name, string(&export.description)]);
}

/// Writes all replies to INFO and GO about an export.
pub(super) fn reply_infos(
    out: &mut Vec<u8>,
    option: u32,
    wanted: Wanted,
    export: &ExportInfo,
    agreed: &Negotiated,
) {
    let mut item = |kind: u16, data: &[&[u8]]| {
        let data: Vec<&[u8]> = data.to_vec();
        let kind = kind.to_be_bytes();
        let parts: Vec<&[u8]> = std::iter::once(kind.as_slice()).chain(data).collect();
        reply(out, option, rep::INFO, &parts);
    };
    let flags = agreed.transmission_flags().to_be_bytes();
    item(info::EXPORT, &[&agreed.size.to_be_bytes(), &flags]);
    item(
        info::BLOCK_SIZE,
        &[
            &agreed.block_min.to_be_bytes(),
            &agreed.block_preferred.to_be_bytes(),
            &agreed.block_max.to_be_bytes(),
        ],
    );
    if wanted.name {
        item(info::NAME, &[string(&export.name)]);
    }
    if wanted.description {
        item(info::DESCRIPTION, &[string(&export.description)]);
    }
}

/// A metadata context. Lists have to give 0 for its id.
pub(super) fn reply_context(out: &mut Vec<u8>, option: u32, id: u32, name: &str) {
    let data: [&[u8]; 2] = [&id.to_be_bytes(), string(name)];
    reply(out, option, rep::META_CONTEXT, &data);
}

/// The reply to EXPORT_NAME, which has no header.
pub(super) fn export_name(agreed: &Negotiated, zeroes: bool) -> Vec<u8> {
    let mut out = agreed.size.to_be_bytes().to_vec();
    out.extend_from_slice(&agreed.transmission_flags().to_be_bytes());
    if zeroes {
        out.extend_from_slice(&[0; 124]);
    }
    out
}

/// A string of ours, no longer than the protocol has them.
fn string(text: &str) -> &[u8] {
    &text.as_bytes()[..text.floor_char_boundary(usize_from(MAX_STRING_BYTES))]
}

fn usize_from(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

fn u32_from(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// The length in front of an export's name in INFO, GO and the metadata options.
pub(super) fn name_len(bytes: &[u8]) -> u32 {
    array_at(bytes, 0).map_or(u32::MAX, u32::from_be_bytes)
}
