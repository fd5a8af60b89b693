//! The codec of the extend protocol against bytes written by hand from its description, and against
//! anything at all.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use blockd_api::extend::{
    Extend, Form, MAX_MESSAGE_BYTES, MAX_NAME_BYTES, Message, Parsed, Refusal, parse,
};
use proptest::prelude::*;

/// The outcome and the bytes of each line.
fn vectors() -> Vec<(String, Vec<u8>)> {
    let line = |line: &str| {
        let (outcome, bytes) = line.split_once(" =").unwrap();
        (outcome.to_owned(), hex(bytes))
    };
    let text = include_str!("vectors.txt");
    text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(line).collect()
}

/// Bytes from hexadecimal digits; spaces are for people.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    assert!(digits.len().is_multiple_of(2), "{text}");
    digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).unwrap()).collect()
}

fn form(form: Form) -> &'static str {
    match form {
        Form::Binary => "binary",
        Form::Ascii => "ascii",
    }
}

/// An outcome as the vectors write it.
fn outcome_text(parsed: &Parsed) -> String {
    match parsed {
        Parsed::Need(count) => format!("need {count}"),
        Parsed::Message(Message::Shutdown(how), 3) => format!("shutdown {}", form(*how)),
        Parsed::Message(Message::Extend(extend), _) => {
            let Extend { form: how, virtual_size, current_size, metadata_size, .. } = extend;
            let name = extend.name.escape_ascii();
            let answer = how.answer();
            let how = form(*how);
            format!(
                "extend {how} {name} {virtual_size} {current_size} {metadata_size} -> {answer:02x}"
            )
        }
        Parsed::Message(..) => format!("{parsed:?}"),
        Parsed::Refused(refusal) => format!("refused {refusal}"),
    }
}

#[test]
fn every_vector_is_read_as_it_is_written() {
    let vectors = vectors();
    assert!(vectors.len() > 35, "{}", vectors.len());
    for (outcome, bytes) in vectors {
        assert_eq!(outcome_text(&parse(&bytes)), outcome, "{bytes:02x?}");
    }
}

#[test]
fn every_message_of_the_vectors_is_written_as_it_is_read() {
    let mut messages = 0;
    for (outcome, bytes) in vectors() {
        if let Parsed::Message(message, used) = parse(&bytes) {
            assert_eq!(message.encode().unwrap(), bytes[..used], "{outcome}");
            messages += 1;
        }
    }
    assert!(messages >= 9, "{messages}");
}

#[test]
fn a_message_that_is_cut_asks_for_what_it_lacks_and_never_for_more() {
    for (outcome, bytes) in vectors() {
        let Parsed::Message(message, used) = parse(&bytes) else { continue };
        let mut have = Vec::new();
        loop {
            match parse(&have) {
                Parsed::Need(count) => {
                    assert!(count > 0 && have.len() + count <= used, "{outcome}");
                    have.extend_from_slice(&bytes[have.len()..have.len() + count]);
                }
                found => {
                    assert_eq!(found, Parsed::Message(message, used), "{outcome}");
                    break;
                }
            }
        }
    }
}

#[test]
fn a_name_has_at_most_254_bytes() {
    let message = |length: usize| {
        let name = vec![b'x'; length];
        let (virtual_size, current_size, metadata_size) = (1, 2, 3);
        let form = Form::Binary;
        Message::Extend(Extend { form, name, virtual_size, current_size, metadata_size })
    };
    let longest = message(MAX_NAME_BYTES).encode().unwrap();
    assert_eq!(longest.len(), MAX_MESSAGE_BYTES);
    assert_eq!(parse(&longest), Parsed::Message(message(MAX_NAME_BYTES), MAX_MESSAGE_BYTES));
    assert_eq!(message(MAX_NAME_BYTES + 1).encode(), Err(Refusal::NameLength(256)));
    assert_eq!(message(0).encode(), Err(Refusal::NameLength(1)));
}

#[test]
fn the_room_of_a_volume_is_computed_without_overflow() {
    let room = |virtual_size, current_size, metadata_size| {
        let (form, name) = (Form::Binary, b"v".to_vec());
        Extend { form, name, virtual_size, current_size, metadata_size }.room()
    };
    assert_eq!(room(10 << 30, 4 << 30, 20 << 20), (6 << 30) + (20 << 20));
    assert_eq!(room(10, 11, 1), 0);
    assert_eq!(room(10, 20, 1), 0);
    assert_eq!(room(u64::MAX, 1, u64::MAX), u64::MAX - 1);
}

/// Whatever the bytes are: what is taken is within them, what is read is what would be written, and
/// nothing more is waited for than a message can have.
fn check_total(bytes: &[u8]) {
    match parse(bytes) {
        Parsed::Need(count) => assert!(count > 0 && bytes.len() + count <= MAX_MESSAGE_BYTES),
        Parsed::Message(message, used) => {
            assert_eq!(message.encode().unwrap(), bytes[..used]);
        }
        Parsed::Refused(refusal) => {
            let text = refusal.to_string();
            assert!(!text.is_empty() && !text.contains('\n'));
            // More bytes don't make it right.
            let more = [bytes, &[0; 8][..]].concat();
            assert_eq!(parse(&more), Parsed::Refused(refusal));
        }
    }
}

fn messages() -> impl Strategy<Value = Message> {
    let forms = prop_oneof![Just(Form::Binary), Just(Form::Ascii)];
    let names = proptest::collection::vec(1..=u8::MAX, 1..=MAX_NAME_BYTES);
    let extend = (forms.clone(), names, any::<[u64; 3]>()).prop_map(|(form, name, numbers)| {
        let [virtual_size, current_size, metadata_size] = numbers;
        Message::Extend(Extend { form, name, virtual_size, current_size, metadata_size })
    });
    prop_oneof![4 => extend, 1 => forms.prop_map(Message::Shutdown)]
}

proptest! {
    #[test]
    fn what_is_written_is_read_again(message in messages(), more in any::<[u8; 4]>()) {
        let bytes = message.encode().unwrap();
        let used = bytes.len();
        prop_assert_eq!(parse(&bytes), Parsed::Message(message.clone(), used));
        prop_assert_eq!(parse(&[&bytes[..], &more].concat()), Parsed::Message(message, used));
    }

    #[test]
    fn a_byte_that_is_wrong_is_never_too_strange(
        message in messages(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<prop::sample::Index>(),
    ) {
        let mut bytes = message.encode().unwrap();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        check_total(&bytes);
        check_total(&bytes[..cut.index(bytes.len())]);
    }

    #[test]
    fn no_bytes_are_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..320)) {
        check_total(&bytes);
    }
}

/// The same bytes on every machine, as many as there were the last time.
#[test]
fn two_hundred_thousand_random_messages() {
    let mut random = fastrand::Rng::with_seed(7);
    let (mut taken, mut cut, mut refused) = (0, 0, 0);
    for _ in 0..200_000 {
        let mut bytes: Vec<u8> = (0..random.usize(0..320)).map(|_| random.u8(..)).collect();
        // Most are nearly right: the head is, or is off by a little.
        if random.u8(..) < 230 && bytes.len() >= 4 {
            let name = random.u8(..);
            let total = u16::from(name) + 28 + u16::from(random.u8(..) < 20);
            bytes[..2].copy_from_slice(&total.to_be_bytes());
            bytes[2] = [0, b'0', 1, b'1', 2][random.usize(0..5)];
            bytes[3] = name;
            if let Some(end) = bytes.get_mut(3 + usize::from(name)).filter(|_| name > 0) {
                *end = 0;
            }
        }
        check_total(&bytes);
        match parse(&bytes) {
            Parsed::Message(..) => taken += 1,
            Parsed::Need(_) => cut += 1,
            Parsed::Refused(_) => refused += 1,
        }
    }
    assert!(taken > 10_000 && cut > 10_000 && refused > 10_000, "{taken} {cut} {refused}");
}
