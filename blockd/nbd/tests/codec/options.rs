//! The handshake: options, their refusal, and what they amount to.

use blockd_nbd::codec::handshake::{
    Event, Handshake, MAX_LIST_BYTES, MAX_OPTION_BYTES, MAX_OPTIONS, Next, Reason, TlsMode,
};
use blockd_nbd::codec::{opt, rep, transmission};
use blockd_nbd::{Describes, ExportInfo, MAX_CONTEXTS, Negotiated, Selected};

use crate::talk::{End, FLAGS, Talk, announced, contexts, go, known_contexts, option, talk};
use crate::{export, hex};

#[test]
fn the_whole_of_a_short_handshake_byte_for_byte() {
    let (end, talk) = talk(TlsMode::Off, &[option(opt::GO, &go("web", &[3, 1, 2]))]);
    assert_eq!(end, End::Entered(Negotiated::plain(&export())));
    let expected = hex("4e42444d41474943 49484156454f5054 0003
         0003e889045565a9 00000007 00000003 0000000c 0000 0000000040000000 0d6d
         0003e889045565a9 00000007 00000003 0000000e 0003 00000200 00001000 02000000
         0003e889045565a9 00000007 00000003 0000000d 0001 64656661756c742f776562
         0003e889045565a9 00000007 00000003 00000007 0002 3120476942
         0003e889045565a9 00000007 00000001 00000000");
    assert_eq!(talk.output, expected);
}

#[test]
fn a_list_byte_for_byte() {
    let (end, talk) = talk(TlsMode::Off, &[option(opt::LIST, &[])]);
    assert_eq!(end, End::Waiting);
    let expected = hex(
        "0003e889045565a9 00000003 00000002 00000014 0000000b 64656661756c742f776562 3120476942
         0003e889045565a9 00000003 00000001 00000000",
    );
    assert_eq!(talk.output[18..], expected);
}

#[test]
fn contexts_byte_for_byte() {
    let set = contexts("web", &["x-other:thing", "base:allocation", "base:", "base:allocation"]);
    let parts = [option(opt::STRUCTURED_REPLY, &[]), option(opt::SET_META_CONTEXT, &set)];
    let (_, talk) = talk(TlsMode::Off, &parts);
    let expected = hex("0003e889045565a9 00000008 00000001 00000000
         0003e889045565a9 0000000a 00000004 00000013 00000001 626173653a616c6c6f636174696f6e
         0003e889045565a9 0000000a 00000001 00000000");
    assert_eq!(talk.output[18..], expected);
}

#[test]
fn export_name_ends_with_zeroes_unless_both_do_without() {
    for (flags, zeroes) in [([0, 0, 0, 1], 124), ([0, 0, 0, 3], 0), ([0, 0, 0, 0], 124)] {
        let input = [flags.to_vec(), option(opt::EXPORT_NAME, b"web")].concat();
        let mut talk = Talk::new(TlsMode::Off, &input);
        assert!(matches!(talk.run(), End::Entered(_)));
        let mut expected = hex("0000000040000000 0d6d");
        expected.extend_from_slice(&vec![0; zeroes]);
        assert_eq!(talk.output[18..], expected);
    }
}

#[test]
fn export_name_that_is_unknown_or_too_long_closes() {
    let (end, _) = talk(TlsMode::Off, &[option(opt::EXPORT_NAME, b"unknown")]);
    assert_eq!(end, End::Closed(Reason::ExportName("no such export")));
    // Closed before the name is there.
    let (end, _) = talk(TlsMode::Off, &[announced(opt::EXPORT_NAME, 4097, b"")]);
    assert_eq!(end, End::Closed(Reason::OptionTooLong(opt::EXPORT_NAME, 4097)));
}

#[test]
fn unknown_client_flags_close() {
    let mut talk = Talk::new(TlsMode::Off, &[0, 0, 0, 7]);
    assert_eq!(talk.run(), End::Closed(Reason::ClientFlags(7)));
}

#[test]
fn an_option_without_the_magic_closes() {
    let (end, _) = talk(TlsMode::Off, &[b"IHAVENOTHING....".to_vec()]);
    assert_eq!(end, End::Closed(Reason::OptionMagic));
}

#[test]
fn abort_is_acknowledged_also_with_data() {
    for abort in [option(opt::ABORT, &[]), option(opt::ABORT, b"bye"), announced(2, u32::MAX, &[])]
    {
        for tls in [TlsMode::Off, TlsMode::Required] {
            let (end, talk) = talk(tls, std::slice::from_ref(&abort));
            assert_eq!(end, End::Closed(Reason::Aborted));
            assert_eq!(talk.replies(), [(opt::ABORT, rep::ACK)]);
        }
    }
}

#[test]
fn an_unknown_option_is_unsupported_and_the_next_one_is_served() {
    for kind in [0, 4, 12, 1 << 31, u32::MAX] {
        let parts = [option(kind, b"whatever"), option(opt::LIST, &[])];
        let (_, talk) = talk(TlsMode::Off, &parts);
        let expected = [(kind, rep::ERR_UNSUP), (opt::LIST, rep::SERVER), (opt::LIST, rep::ACK)];
        assert_eq!(talk.replies(), expected);
    }
}

#[test]
fn an_option_that_announces_too_much_is_refused_before_a_byte_of_it_is_read() {
    let every = [
        opt::LIST,
        opt::STARTTLS,
        opt::INFO,
        opt::GO,
        opt::STRUCTURED_REPLY,
        opt::LIST_META_CONTEXT,
        opt::SET_META_CONTEXT,
        opt::EXTENDED_HEADERS,
        99,
    ];
    for kind in every {
        for len in [u32::MAX, 1 << 31, MAX_OPTION_BYTES + 1] {
            let (end, talk) = talk(TlsMode::Off, &[announced(kind, len, &[])]);
            assert_eq!(end, End::Closed(Reason::OptionTooLong(kind, len)));
            let replies = talk.replies();
            assert!(replies.len() == 1 && replies[0].1 & rep::ERROR != 0, "{kind} {replies:?}");
        }
    }
}

#[test]
fn a_name_that_cannot_be_there_is_refused_without_waiting_for_it() {
    let structured = option(opt::STRUCTURED_REPLY, &[]);
    for kind in [opt::INFO, opt::GO, opt::LIST_META_CONTEXT, opt::SET_META_CONTEXT] {
        for (name, len, expected) in [
            (4097_u32, 5000, rep::ERR_TOO_BIG),
            (u32::MAX, 100, rep::ERR_TOO_BIG),
            (100, 100, rep::ERR_INVALID),
            (4096, 4099, rep::ERR_INVALID),
        ] {
            // Only the name's length arrives of what was announced.
            let refused = announced(kind, len, &name.to_be_bytes());
            let (end, talk) = talk(TlsMode::Off, &[structured.clone(), refused]);
            assert_eq!(end, End::Waiting);
            assert_eq!(talk.replies()[1..], [(kind, expected)]);
        }
        let (_, talk) = talk(TlsMode::Off, &[structured.clone(), announced(kind, 3, &[])]);
        assert_eq!(talk.replies()[1..], [(kind, rep::ERR_INVALID)]);
    }
}

#[test]
fn counts_past_the_payload_are_invalid_and_the_next_option_is_served() {
    let more_items = [go("web", &[]), vec![0; 3]].concat();
    let mut fewer_items = go("web", &[]);
    fewer_items[8] = 200;
    let mut many_queries = contexts("web", &["base:allocation"]);
    many_queries[7..11].copy_from_slice(&u32::MAX.to_be_bytes());
    let mut long_query = contexts("web", &["base:allocation"]);
    long_query[11..15].copy_from_slice(&4096_u32.to_be_bytes());
    let trailing = [contexts("web", &["base:allocation"]), vec![0]].concat();
    for (kind, data) in [
        (opt::GO, more_items),
        (opt::INFO, fewer_items),
        (opt::SET_META_CONTEXT, many_queries),
        (opt::LIST_META_CONTEXT, long_query),
        (opt::SET_META_CONTEXT, trailing),
        (opt::GO, go("a\0b", &[])),
        (opt::LIST, vec![1]),
        (opt::STRUCTURED_REPLY, vec![1]),
        (opt::EXTENDED_HEADERS, vec![1, 2]),
    ] {
        let parts =
            [option(opt::STRUCTURED_REPLY, &[]), option(kind, &data), option(opt::LIST, &[])];
        let (_, talk) = talk(TlsMode::Off, &parts);
        let expected = [(kind, rep::ERR_INVALID), (opt::LIST, rep::SERVER), (opt::LIST, rep::ACK)];
        assert_eq!(talk.replies()[1..], expected);
    }
}

#[test]
fn too_many_queries_or_too_long_ones_are_too_big() {
    let many = contexts("web", &["x:"; 65]);
    let mut long = contexts("web", &[&"x".repeat(5000)]);
    for data in [&mut long, &mut many.clone()] {
        let parts = [
            option(opt::STRUCTURED_REPLY, &[]),
            option(opt::SET_META_CONTEXT, data),
            option(opt::LIST, &[]),
        ];
        let (_, talk) = talk(TlsMode::Off, &parts);
        assert_eq!(talk.replies()[1], (opt::SET_META_CONTEXT, rep::ERR_TOO_BIG));
        assert_eq!(talk.replies()[2], (opt::LIST, rep::SERVER));
    }
}

#[test]
fn too_many_options_close() {
    let nop = option(99, &[]);
    let parts = vec![nop; usize::try_from(MAX_OPTIONS).unwrap() + 1];
    let (end, _) = talk(TlsMode::Off, &parts);
    assert_eq!(end, End::Closed(Reason::TooManyOptions));
}

fn entered(parts: &[Vec<u8>]) -> (Negotiated, Vec<(u32, u32)>) {
    let (end, talk) = talk(TlsMode::Off, parts);
    match end {
        End::Entered(agreed) => (agreed, talk.replies()),
        other => panic!("{other:?}"),
    }
}

#[test]
fn extended_headers_go_before_structured_replies_in_either_order() {
    let (extended, structured) =
        (option(opt::EXTENDED_HEADERS, &[]), option(opt::STRUCTURED_REPLY, &[]));
    let enter = option(opt::GO, &go("", &[]));
    let (agreed, _) = entered(&[structured.clone(), extended.clone(), enter.clone()]);
    assert!(agreed.structured && agreed.extended);
    let (agreed, replies) = entered(&[extended.clone(), structured, enter]);
    assert!(agreed.structured && agreed.extended);
    assert_eq!(replies[1], (opt::STRUCTURED_REPLY, rep::ERR_EXT_HEADER_REQD));
    assert_ne!(agreed.transmission_flags() & transmission::SEND_DF, 0);
    // EXPORT_NAME can't be used with them.
    let (end, _) = talk(TlsMode::Off, &[extended, option(opt::EXPORT_NAME, b"web")]);
    assert_eq!(end, End::Closed(Reason::ExportName("extended headers were negotiated")));
}

#[test]
fn contexts_need_structured_replies_and_hold_for_one_export() {
    let set = option(opt::SET_META_CONTEXT, &contexts("web", &["base:allocation"]));
    let structured = option(opt::STRUCTURED_REPLY, &[]);
    let enter = option(opt::GO, &go("default/web", &[]));
    let (agreed, replies) = entered(&[set.clone(), enter.clone()]);
    assert!(agreed.contexts.is_empty());
    assert_eq!(replies[0], (opt::SET_META_CONTEXT, rep::ERR_INVALID));
    // The same export under another name.
    let (agreed, _) = entered(&[structured.clone(), set.clone(), enter.clone()]);
    let base = Selected { id: 1, describes: Describes::BaseAllocation };
    assert_eq!(agreed.contexts, [base]);
    // Each SET replaces the one before, also one that fails or selects nothing.
    for later in [
        option(opt::SET_META_CONTEXT, &contexts("web", &[])),
        option(opt::SET_META_CONTEXT, &contexts("web", &["base:"])),
        option(opt::SET_META_CONTEXT, &contexts("unknown", &["base:allocation"])),
        option(opt::SET_META_CONTEXT, &[1]),
    ] {
        let (agreed, _) = entered(&[structured.clone(), set.clone(), later, enter.clone()]);
        assert!(agreed.contexts.is_empty());
    }
}

#[test]
fn changes_since_a_snapshot_are_selected_by_its_name_alone() {
    let queries = [
        "blockd:changed-since:tue",
        "blockd:changed-since:wed",
        "blockd:changed-since:",
        "blockd:",
        "blockd:allocated",
        "Blockd:allocated",
    ];
    let set = option(opt::SET_META_CONTEXT, &contexts("web", &queries));
    let parts = [option(opt::STRUCTURED_REPLY, &[]), set, option(opt::GO, &go("web", &[]))];
    let (agreed, _) = entered(&parts);
    let selected = [(1, Describes::Allocated), (2, Describes::ChangedSince(11))];
    assert_eq!(agreed.contexts, selected.map(|(id, describes)| Selected { id, describes }));
}

#[test]
fn too_many_contexts_are_refused_and_none_of_them_is_selected() {
    let names: Vec<String> = (0..=MAX_CONTEXTS).map(|number| format!("s{number}")).collect();
    let select = |count: usize| {
        let queries = names.iter().map(|name| format!("blockd:changed-since:{name}"));
        let queries: Vec<String> = queries.take(count).collect();
        let queries: Vec<&str> = queries.iter().map(String::as_str).collect();
        let parts = [
            option(opt::STRUCTURED_REPLY, &[]),
            option(opt::SET_META_CONTEXT, &contexts("web", &queries)),
            option(opt::GO, &go("web", &[])),
        ];
        let mut talk = Talk::new(TlsMode::Off, &[FLAGS.to_vec(), parts.concat()].concat());
        talk.snapshots = names.iter().map(|name| &*name.clone().leak()).collect();
        let End::Entered(agreed) = talk.run() else { panic!("refused") };
        (agreed.contexts.len(), talk.replies()[1])
    };
    let first = (opt::SET_META_CONTEXT, rep::META_CONTEXT);
    assert_eq!(select(MAX_CONTEXTS), (MAX_CONTEXTS, first));
    assert_eq!(select(MAX_CONTEXTS + 1), (0, (opt::SET_META_CONTEXT, rep::ERR_TOO_BIG)));
}

/// The names that a list of contexts has.
fn listed(snapshots: usize, queries: &[&str]) -> Vec<String> {
    let mut handshake = Handshake::new(TlsMode::Off);
    handshake.handle(Event::Connected);
    handshake.handle(Event::Bytes(&FLAGS));
    handshake.handle(Event::Bytes(&option(opt::STRUCTURED_REPLY, &[])));
    let asked = option(opt::LIST_META_CONTEXT, &contexts("web", queries));
    handshake.handle(Event::Bytes(&asked[..16]));
    handshake.handle(Event::Bytes(&asked[16..20]));
    assert_eq!(handshake.handle(Event::Bytes(&asked[20..])).next, Next::Open("web".to_owned()));
    assert_eq!(handshake.handle(Event::Opened(Ok(&export()))).next, Next::Contexts);
    let known = known_contexts((0..snapshots).map(|number| format!("s{number}")));
    let send = handshake.handle(Event::Contexts(&known)).send;
    let (mut names, mut rest) = (Vec::new(), &send[..]);
    while rest[12..16] == rep::META_CONTEXT.to_be_bytes() {
        let len = usize::try_from(u32::from_be_bytes(rest[16..20].try_into().expect("it fits")))
            .expect("it fits");
        assert_eq!(rest[20..24], [0; 4], "ids are for what is selected");
        names.push(String::from_utf8(rest[24..20 + len].to_vec()).expect("it fits"));
        rest = &rest[20 + len..];
    }
    assert_eq!((rest.len(), &rest[12..16]), (20, &rep::ACK.to_be_bytes()[..]));
    names
}

#[test]
fn a_list_of_contexts_is_what_its_queries_begin() {
    let all = ["base:allocation", "blockd:allocated", "blockd:changed-since:s0"];
    assert_eq!(listed(1, &[]), all);
    assert_eq!(listed(1, &["base:", "blockd:"]), all);
    assert_eq!(listed(1, &["blockd:"]), all[1..]);
    assert_eq!(listed(1, &["blockd:changed-since:"]), all[2..]);
    assert_eq!(listed(3, &["blockd:changed-since:s1"]), ["blockd:changed-since:s1"]);
    assert!(listed(1, &["blockd", "base", "x:", "blockd:changed-since:s"]).is_empty());
}

#[test]
fn a_long_list_of_snapshots_has_the_newest_and_says_that_there_are_more() {
    let names = listed(1000, &["blockd:changed-since:", "blockd:changed-since:s7"]);
    assert_eq!(names[..2], ["blockd:changed-since:", "blockd:changed-since:s7"]);
    assert_eq!((names.len(), &*names[257]), (258, "blockd:changed-since:s999"));
}

#[test]
fn listing_contexts_takes_wildcards_and_selects_nothing() {
    for queries in [&[][..], &["base:"], &["base:allocation"]] {
        let list = option(opt::LIST_META_CONTEXT, &contexts("web", queries));
        let parts = [option(opt::STRUCTURED_REPLY, &[]), list, option(opt::GO, &go("web", &[]))];
        let (agreed, replies) = entered(&parts);
        assert_eq!(replies[1], (opt::LIST_META_CONTEXT, rep::META_CONTEXT));
        assert!(agreed.contexts.is_empty());
    }
}

#[test]
fn an_unknown_export_is_an_error_and_another_can_be_had() {
    let parts = [
        option(opt::INFO, &go("unknown", &[])),
        option(opt::GO, &go("unknown", &[])),
        option(opt::GO, &go("web", &[])),
    ];
    let (_, replies) = entered(&parts);
    assert_eq!(replies[..2], [(opt::INFO, rep::ERR_UNKNOWN), (opt::GO, rep::ERR_UNKNOWN)]);
}

#[test]
fn tls_forgets_what_was_said_in_the_clear() {
    let parts = [
        option(opt::STRUCTURED_REPLY, &[]),
        option(opt::EXTENDED_HEADERS, &[]),
        option(opt::SET_META_CONTEXT, &contexts("web", &["base:allocation"])),
        option(opt::STARTTLS, &[]),
        option(opt::GO, &go("web", &[])),
    ];
    let (end, _) = talk(TlsMode::On, &parts);
    let expected = Negotiated { tls: true, ..Negotiated::plain(&export()) };
    assert_eq!(end, End::Entered(expected));
}

#[test]
fn tls_is_refused_where_there_is_none_and_when_it_is_there() {
    let start = option(opt::STARTTLS, &[]);
    let (_, off) = talk(TlsMode::Off, std::slice::from_ref(&start));
    assert_eq!(off.replies(), [(opt::STARTTLS, rep::ERR_POLICY)]);
    let (_, data) = talk(TlsMode::On, &[option(opt::STARTTLS, b"x")]);
    assert_eq!(data.replies(), [(opt::STARTTLS, rep::ERR_INVALID)]);
    let (_, twice) = talk(TlsMode::On, &[start.clone(), start]);
    let expected = [(opt::STARTTLS, rep::ACK), (opt::STARTTLS, rep::ERR_INVALID)];
    assert_eq!(twice.replies(), expected);
}

#[test]
fn nothing_is_had_without_tls_where_it_is_required() {
    for kind in [opt::LIST, opt::INFO, opt::GO, opt::STRUCTURED_REPLY, opt::SET_META_CONTEXT, 99] {
        let data = if kind == opt::GO { go("web", &[]) } else { Vec::new() };
        let (end, talk) = talk(TlsMode::Required, &[option(kind, &data)]);
        assert_eq!(end, End::Waiting);
        assert_eq!(talk.replies(), [(kind, rep::ERR_TLS_REQD)]);
    }
    let (end, _) = talk(TlsMode::Required, &[option(opt::EXPORT_NAME, b"web")]);
    assert_eq!(end, End::Closed(Reason::ExportName("TLS is required")));
    let parts = [option(opt::STARTTLS, &[]), option(opt::GO, &go("web", &[]))];
    assert!(matches!(talk(TlsMode::Required, &parts).0, End::Entered(_)));
    let mut plain = Talk::new(TlsMode::Required, &[0, 0, 0, 2]);
    assert_eq!(plain.run(), End::Closed(Reason::NotFixed));
}

#[test]
fn a_list_that_is_too_long_says_so() {
    let many: Vec<_> = (0..100_000)
        .map(|number| ExportInfo { name: format!("default/volume-{number}"), ..export() })
        .collect();
    let mut handshake = Handshake::new(TlsMode::Off);
    handshake.handle(Event::Connected);
    handshake.handle(Event::Bytes(&FLAGS));
    assert_eq!(handshake.handle(Event::Bytes(&option(opt::LIST, &[]))).next, Next::List);
    let send = handshake.handle(Event::Exports(&many)).send;
    assert!(send.len() > MAX_LIST_BYTES / 2 && send.len() <= MAX_LIST_BYTES + 64);
    let end = send.len() - 20 - "there are more exports".len();
    assert_eq!(send[end + 12..end + 16], rep::ERR_TOO_BIG.to_be_bytes());
}
