//! Labels in check, dump, restore and repair.

use blockd_inspect::check::Severity;
use blockd_inspect::repair::RepairOptions;
use blockd_mapper::engine::Control;
use blockd_mapper::format::Labels;
use blockd_mapper::units::VolumeId;

use crate::common::{Media, Rig};
use crate::tools::{
    MIB, PAGE, checked, closed, contents, dumped, family, made, repaired, restored, scanned,
};

fn all_labels(media: &Media) -> Vec<(String, String)> {
    let rig = Rig::open(media.clone()).unwrap();
    let volumes = rig.pool.summaries().into_iter();
    volumes.map(|one| (one.name, one.labels.text().to_owned())).collect()
}

fn label(rig: &mut Rig, volume: VolumeId, pairs: &[(&str, &str)]) {
    let labels = Labels::new(pairs.iter().copied()).unwrap();
    rig.control(Control::Label { volume, labels }).unwrap();
}

/// A family of which two have labels, and one that the log has made has none.
fn labelled() -> Media {
    let mut rig = family(&[12 * MIB], 100 << 20);
    let ids: Vec<_> = rig.pool.summaries().into_iter().map(|one| one.id).collect();
    label(&mut rig, ids[0], &[("team", "db"), ("a.b/c", "one = two")]);
    label(&mut rig, ids[1], &[("kind", "")]);
    rig.media.clone()
}

fn page_of(media: &Media, text: &[u8]) -> usize {
    let pages = media.devices[0].chunks(PAGE).enumerate();
    let mut pages = pages.filter(|(_, page)| page.starts_with(b"BDpg\x05"));
    pages.find(|(_, page)| page[64..].starts_with(text)).unwrap().0 * PAGE
}

#[test]
fn a_pool_with_labels_is_sound_and_a_dump_of_it_brings_them_back() {
    let media = labelled();
    let report = checked(&media);
    assert!(report.findings.is_empty(), "{report:?}");
    let (text, dumped_report) = dumped(&media);
    assert!(dumped_report.lost.is_empty());
    assert!(text.contains("\nlabel a.b/c=one = two\nlabel team=db\n"), "{text}");
    let before = (all_labels(&media), contents(media.clone()));
    let mut target = media.clone();
    target.devices[0][2 * PAGE..4 * PAGE].fill(0x11);
    restored(&mut target, &text);
    assert!(checked(&target).findings.is_empty());
    assert_eq!((all_labels(&target), contents(target)), before);
}

#[test]
fn a_line_of_a_label_that_breaks_a_rule_is_refused_by_its_number() {
    let text = dumped(&labelled()).0;
    for (from, to) in [
        ("label team=db", "label =db"),
        ("label team=db", "label team"),
        ("label team=db", "label a.b/c=again"),
    ] {
        let edited = text.replace(from, to);
        // The sum is that of the edited text: the line itself is what is refused.
        let lines = edited.lines().take_while(|line| !line.starts_with("end "));
        let body: String = lines.map(|line| format!("{line}\n")).collect();
        let sum = blockd_mapper::format::checksum::sum(body.as_bytes());
        let edited = format!("{body}end {} {sum:016x}\n", body.lines().count());
        let error = scanned(&edited).unwrap_err().to_string();
        assert!(error.starts_with("line ") && error.contains("label"), "{to}: {error}");
    }
}

#[test]
fn a_check_names_the_volume_whose_labels_are_damaged_and_a_repair_keeps_the_rest() {
    let mut media = closed(Rig::open(labelled()).unwrap());
    let (before, data) = (all_labels(&media), contents(media.clone()));
    let at = page_of(&media, b"a.b/c");
    media.devices[0][at + 70] ^= 1;
    let report = checked(&media);
    let [finding] = &report.findings[..] else { panic!("{report:?}") };
    let volume = finding.name.clone().unwrap();
    assert_eq!((finding.severity, finding.kind), (Severity::Damage, "labels"));
    assert!(finding.text.contains("its labels are lost, its data is not"), "{}", finding.text);
    let (text, report) = dumped(&media);
    assert_eq!(report.lost.len(), 1);
    assert!(!text.contains("team=db"));
    let report = repaired(&mut media, RepairOptions::default());
    assert!(report.changed && report.lost.len() == 1 && report.salvaged.is_empty(), "{report:?}");
    assert!(checked(&media).findings.is_empty());
    let expected = before.into_iter().map(|(name, labels)| {
        let labels = if name == volume { String::new() } else { labels };
        (name, labels)
    });
    assert_eq!(all_labels(&media), expected.collect::<Vec<_>>());
    assert_eq!(contents(media), data);
}

#[test]
fn labels_that_are_lost_in_a_pool_that_was_not_closed_are_no_reason_for_a_repair() {
    let mut media = labelled();
    let at = page_of(&media, b"a.b/c");
    media.devices[0][at + 70] ^= 1;
    let report = checked(&media);
    let [finding] = &report.findings[..] else { panic!("{report:?}") };
    assert_eq!((finding.severity, finding.kind), (Severity::Warning, "labels"));
    let (before, data) = (media.devices.clone(), contents(media.clone()));
    let report = repaired(&mut media, RepairOptions::default());
    assert!(!report.damaged && media.devices == before, "{report:?}");
    assert_eq!(contents(media), data);
}

#[test]
fn what_the_log_makes_has_no_labels_and_what_it_deletes_takes_its_own_along() {
    let mut rig = Rig::new(&[12 * MIB]);
    let [a, b] = ["a", "b"].map(|name| rig.create(name, 1 << 20));
    label(&mut rig, a, &[("k", "1")]);
    label(&mut rig, b, &[("k", "2")]);
    made(&mut rig, Control::Snapshot { source: a, name: "s".to_owned() });
    rig.control(Control::Delete { volume: b }).unwrap();
    rig.control(Control::Rename { volume: a, name: "c".to_owned() }).unwrap();
    let (text, _) = dumped(&rig.media);
    let labels: Vec<_> = text.lines().filter(|line| line.starts_with("label ")).collect();
    assert_eq!(labels, ["label k=1"]);
    assert!(checked(&rig.media).findings.is_empty());
    let media = closed(rig);
    assert!(checked(&media).findings.is_empty());
}
