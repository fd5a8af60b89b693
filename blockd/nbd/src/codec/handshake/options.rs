//! The options of a client that name an export.

use super::super::super::{
    BASE_ALLOCATION, CHANGED_SINCE, Describes, ExportError, ExportInfo, MAX_CONTEXTS, MetaContext,
    Selected,
};
use super::super::option::{self, Queries};
use super::super::{MAX_STRING_BYTES, opt, rep};
use super::{
    Asking, Handshake, MAX_LIST_BYTES, MAX_LISTED_SNAPSHOTS, MAX_OPTION_BYTES, Next, Reason, State,
    Step, as_usize, close,
};

/// The names to be listed. Where some are left out, the beginning that they have in common is there
/// in their place: the document allows this to show that there are more.
fn listed<'a>(queries: &Queries, contexts: &'a [MetaContext]) -> Vec<&'a str> {
    let is_snapshot = |one: &&MetaContext| matches!(one.describes, Describes::ChangedSince(_));
    let by_prefix = |one: &&MetaContext| is_snapshot(one) && !queries.select(&one.name);
    let snapshots = contexts.iter().filter(by_prefix).count();
    let mut surplus = snapshots.saturating_sub(MAX_LISTED_SNAPSHOTS);
    let mut names = if surplus > 0 { vec![CHANGED_SINCE] } else { Vec::new() };
    for one in contexts {
        if surplus > 0 && by_prefix(&one) {
            surplus -= 1;
            continue;
        }
        names.push(&one.name);
    }
    names
}

fn is_meta(kind: u32) -> bool {
    matches!(kind, opt::LIST_META_CONTEXT | opt::SET_META_CONTEXT)
}

/// Bytes that have to be there after the name: the number of items, or of queries.
fn after_name(kind: u32) -> u32 {
    if is_meta(kind) { 4 } else { 2 }
}

impl Handshake {
    /// INFO, GO and the metadata options begin with a name's length, which is judged before
    /// the rest is read.
    pub(super) fn option_with_name(&mut self, option: option::Header) -> Step {
        if option.kind == opt::SET_META_CONTEXT {
            // The former selection is gone, also when this one fails.
            self.agreed.contexts = None;
        }
        if option.len > MAX_OPTION_BYTES {
            return self.refuse(option, rep::ERR_TOO_BIG, "the option's data is too long");
        }
        if is_meta(option.kind) && !self.agreed.structured {
            let message = "structured replies have to be negotiated first";
            return self.refuse(option, rep::ERR_INVALID, message);
        }
        if option.len < 4 + after_name(option.kind) {
            return self.refuse(option, rep::ERR_INVALID, "the option's data is too short");
        }
        self.state = State::NameLen(option);
        Step { send: Vec::new(), next: Next::Read(4) }
    }

    pub(super) fn name_len(&mut self, option: option::Header, name_len: u32) -> Step {
        let rest = 4 + after_name(option.kind);
        if let Err(wrong) = option::check_name_len(name_len, option.len, rest) {
            return self.refuse_rest(option, option.len - 4, wrong.reply, wrong.message);
        }
        self.state = State::Data(option, name_len);
        Step { send: Vec::new(), next: Next::Read(as_usize(option.len - 4)) }
    }

    pub(super) fn data(&mut self, option: option::Header, name_len: u32, bytes: &[u8]) -> Step {
        let parsed = if is_meta(option.kind) {
            option::parse_queries(bytes, name_len)
                .map(|(name, queries)| (name, Asking::Contexts { option: option.kind, queries }))
        } else {
            option::parse_info(bytes, name_len)
                .map(|(name, wanted)| (name, Asking::Info { option: option.kind, wanted }))
        };
        match parsed {
            Ok((name, asking)) => self.open(name, asking),
            Err(wrong) => self.refuse_rest(option, 0, wrong.reply, wrong.message),
        }
    }

    pub(super) fn open(&mut self, name: String, asking: Asking) -> Step {
        self.state = State::Opening(asking);
        Step { send: Vec::new(), next: Next::Open(name) }
    }

    pub(super) fn list(&mut self, exports: &[ExportInfo]) -> Step {
        let mut send = Vec::new();
        for export in exports {
            let before = send.len();
            option::reply_server(&mut send, opt::LIST, export);
            if send.len() > MAX_LIST_BYTES {
                send.truncate(before);
                let message: &[u8] = b"there are more exports";
                option::reply(&mut send, opt::LIST, rep::ERR_TOO_BIG, &[message]);
                return self.next_option(send);
            }
        }
        option::reply(&mut send, opt::LIST, rep::ACK, &[]);
        self.next_option(send)
    }

    pub(super) fn opened(
        &mut self,
        asking: Asking,
        result: Result<&ExportInfo, &ExportError>,
    ) -> Step {
        match (asking, result) {
            (Asking::ExportName, Err(_)) => close(Reason::ExportName("no such export")),
            (Asking::ExportName, Ok(export)) => {
                let agreed = self.negotiated(export);
                let send = option::export_name(&agreed, !self.no_zeroes);
                Step { send, next: Next::Enter(agreed) }
            }
            (Asking::Info { option, .. } | Asking::Contexts { option, .. }, Err(error)) => {
                let kind = match error {
                    ExportError::Unknown => rep::ERR_UNKNOWN,
                    ExportError::Refused(_) => rep::ERR_POLICY,
                    ExportError::ShuttingDown => rep::ERR_SHUTDOWN,
                };
                let message = error.to_string();
                let end = message.floor_char_boundary(as_usize(MAX_STRING_BYTES));
                let mut send = Vec::new();
                option::reply(&mut send, option, kind, &[&message.as_bytes()[..end]]);
                self.next_option(send)
            }
            (Asking::Info { option, wanted }, Ok(export)) => {
                let agreed = self.negotiated(export);
                let mut send = Vec::new();
                option::reply_infos(&mut send, option, wanted, export, &agreed);
                option::reply(&mut send, option, rep::ACK, &[]);
                if option == opt::GO {
                    return Step { send, next: Next::Enter(agreed) };
                }
                self.next_option(send)
            }
            (Asking::Contexts { option, queries }, Ok(export)) => {
                self.state = State::Describing { option, queries, export: export.name.clone() };
                Step { send: Vec::new(), next: Next::Contexts }
            }
        }
    }

    pub(super) fn contexts(
        &mut self,
        option: u32,
        queries: &Queries,
        export: String,
        contexts: &[MetaContext],
    ) -> Step {
        let mut send = Vec::new();
        if option == opt::SET_META_CONTEXT {
            let names = std::iter::once((BASE_ALLOCATION, Describes::BaseAllocation));
            let names = names.chain(contexts.iter().map(|one| (one.name.as_str(), one.describes)));
            let wanted = names.filter(|(name, _)| queries.select(name));
            let mut selected = Vec::new();
            for ((name, describes), id) in wanted.zip(1..) {
                option::reply_context(&mut send, option, id, name);
                selected.push(Selected { id, describes });
            }
            if selected.len() > MAX_CONTEXTS {
                let message = format!("at most {MAX_CONTEXTS} contexts can be selected");
                send.clear();
                option::reply(&mut send, option, rep::ERR_TOO_BIG, &[message.as_bytes()]);
                return self.next_option(send);
            }
            self.agreed.contexts = Some((export, selected));
        } else {
            let names = std::iter::once(BASE_ALLOCATION);
            for name in names.chain(listed(queries, contexts)) {
                if queries.list(name) {
                    option::reply_context(&mut send, option, 0, name);
                }
            }
        }
        option::reply(&mut send, option, rep::ACK, &[]);
        self.next_option(send)
    }
}
