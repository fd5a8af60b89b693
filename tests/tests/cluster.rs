//! The sequences of `tests/cluster`: those that need no block device are replayed here, the others
//! by `cargo ci vm cluster`. The recorder stands between replay and plugin once.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "a test ends where an expectation fails")]

use blockd_testkit::tools;
use blockd_tests::cluster::{Recorder, Replay, Sequence};
use blockd_tests::csi::rig::{Rig, Settings};

/// As the shipped manifest starts the plugin.
fn rig(name: &str) -> Rig {
    let words = vec!["--expand-on-node".to_owned()];
    Rig::start(name, &Settings { words, ..Settings::default() }).unwrap()
}

fn native() -> Vec<Sequence> {
    let all = Sequence::all().unwrap().into_iter();
    all.filter(|sequence| !sequence.needs_devices()).collect()
}

#[test]
fn sequences_are_documented_and_say_where_their_order_is_from() {
    let all = Sequence::all().unwrap();
    assert!(all.len() >= 12, "{}", all.len());
    let readme = tools::workspace_root().join("tests/cluster/README.md");
    let readme = std::fs::read_to_string(readme).unwrap();
    for sequence in all {
        let (name, header) = (&sequence.name, &sequence.header);
        assert!(readme.contains(&format!("| `{name}` |")), "{name} is not in the README");
        assert!(header.synthetic && !header.sources.is_empty(), "{name}");
        assert!(!header.about.is_empty() && header.pause_scale.is_some(), "{name}");
    }
}

#[test]
fn the_example_of_the_documentation_is_a_recording() {
    let text = std::fs::read_to_string(tools::workspace_root().join("docs/RECORDINGS.md")).unwrap();
    let example =
        text.split("```text\n").find(|block| block.starts_with("{\"recording\"")).unwrap();
    let example = example.split("```").next().unwrap();
    let sequence = Sequence::parse("docs/RECORDINGS.md", example).unwrap();
    assert_eq!((sequence.calls(), sequence.header.callers.len()), (1, 1));
    assert!(example.trim_end().lines().last().unwrap().starts_with("{\"end\":"), "{example}");
}

#[test]
fn sequences_without_devices_are_replayed() {
    let sequences = native();
    assert!(sequences.len() >= 2, "{sequences:?}");
    let mut rig = rig("cluster");
    for sequence in sequences {
        let replayed = Replay::new(&mut rig).unwrap().run(&sequence);
        replayed.unwrap_or_else(|error| panic!("{error:#}; {}", rig.plugin.last_words()));
        assert_eq!(rig.control().unwrap().names().unwrap(), [""; 0], "{}", sequence.name);
    }
}

#[test]
fn a_wrong_answer_ends_a_replay() {
    let mut rig = rig("wrong");
    let sequence = native().into_iter().find(|one| one.name == "group-snapshot").unwrap();
    let path = tools::workspace_root().join("tests/cluster/group-snapshot.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    for (right, wrong, problem) in [
        (
            "\"capacity_bytes\":67108864",
            "\"capacity_bytes\":67108865",
            "capacity_bytes is 67108864, not 67108865",
        ),
        ("\"code\":\"OK\"", "\"code\":\"NOT_FOUND\"", "it ended with OK, not NOT_FOUND"),
        ("\"count\":0", "\"count\":1", "the daemon has [], not 1"),
    ] {
        assert!(text.contains(right), "{right}");
        let text = text.replace(right, wrong);
        let changed = Sequence::parse("wrong", &text).unwrap();
        assert_eq!(changed.calls(), sequence.calls());
        let error = Replay::new(&mut rig).unwrap().run(&changed).unwrap_err();
        assert!(format!("{error:#}").contains(problem), "{error:#}");
    }
}

#[test]
fn a_replay_that_was_recorded_is_replayed_again() {
    let sequence = native().into_iter().find(|one| one.name == "group-snapshot").unwrap();
    let mut rig = rig("recorded");
    let recorder = Recorder::start(&rig.plugin.socket()).unwrap();
    Replay::through(&mut rig, &recorder.socket()).unwrap().run(&sequence).unwrap();
    let recorded = recorder.stop().unwrap();
    assert_eq!(recorded.header.callers, ["a replay"]);
    assert!(!recorded.header.synthetic);
    assert_eq!(recorded.methods().collect::<Vec<_>>(), sequence.methods().collect::<Vec<_>>());
    // With the ids that it has, and what a real cluster's file says of times.
    Replay::new(&mut rig).unwrap().run(&recorded).unwrap();
    assert_eq!(rig.control().unwrap().names().unwrap(), [""; 0]);
}
