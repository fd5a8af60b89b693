use super::*;

fn oracle() -> Oracle {
    let mut oracle = Oracle::default();
    let intent = Intent::Create { name: "a".into(), units: 8, block_units: 1 };
    oracle.begin_control(1, intent);
    oracle.end_control(1, Ok(&[1]));
    oracle
}

fn write(oracle: &mut Oracle, units: Range<usize>) -> (u64, ChangeId) {
    let number = oracle.write_number();
    (number, oracle.begin_change(1, units, Payload::Tags(number)).unwrap())
}

fn read(oracle: &mut Oracle, unit: usize, value: Value) -> Result<(), Violation> {
    let reading = oracle.begin_read(1, unit..unit + 1).unwrap();
    oracle.end_read(&reading, &[value])
}

#[test]
fn an_answered_write_must_be_read_and_a_kill_keeps_it() {
    let mut oracle = oracle();
    let (number, change) = write(&mut oracle, 0..2);
    oracle.end_change(1, change, false, false);
    let value = Value::data(number, 0, 1);
    read(&mut oracle, 1, value).unwrap();
    oracle.killed();
    assert_eq!(read(&mut oracle, 1, Value::ZERO).unwrap_err().breach, Breach::Lost);
    let wrong = Value::data(number, 0, 0);
    assert_eq!(read(&mut oracle, 1, wrong).unwrap_err().breach, Breach::Misplaced);
    read(&mut oracle, 1, value).unwrap();
}

#[test]
fn power_loss_may_drop_unflushed_writes_and_only_those() {
    let mut oracle = oracle();
    let (first, change) = write(&mut oracle, 0..1);
    oracle.end_change(1, change, false, false);
    let since = oracle.tick();
    oracle.end_flush(1, since);
    let (second, change) = write(&mut oracle, 0..1);
    oracle.end_change(1, change, false, false);
    oracle.power_lost();
    let mut other = oracle.clone();
    read(&mut oracle, 0, Value::data(first, 0, 0)).unwrap();
    read(&mut other, 0, Value::data(second, 0, 0)).unwrap();
    // A value that was read once stays.
    assert_eq!(read(&mut other, 0, Value::data(first, 0, 0)).unwrap_err().breach, Breach::Stale);
    assert!(read(&mut oracle, 0, Value::ZERO).is_err());
}

#[test]
fn a_flush_does_not_cover_a_write_answered_after_it_arrived() {
    let mut oracle = oracle();
    let (_, change) = write(&mut oracle, 0..1);
    let since = oracle.tick();
    oracle.end_change(1, change, false, false);
    oracle.end_flush(1, since);
    oracle.power_lost();
    read(&mut oracle, 0, Value::ZERO).unwrap();
}

#[test]
fn fua_is_durable_alone_and_supersedes_earlier_writes() {
    let mut oracle = oracle();
    let (old, change) = write(&mut oracle, 0..2);
    oracle.end_change(1, change, false, false);
    let (new, change) = write(&mut oracle, 0..1);
    oracle.end_change(1, change, false, true);
    oracle.power_lost();
    let mut other = oracle.clone();
    assert!(read(&mut other, 0, Value::data(old, 0, 0)).is_err());
    read(&mut oracle, 0, Value::data(new, 0, 0)).unwrap();
    read(&mut oracle, 1, Value::ZERO).unwrap();
}

#[test]
fn a_snapshot_has_all_answered_writes_and_may_have_those_in_flight() {
    let mut oracle = oracle();
    let (before, change) = write(&mut oracle, 0..1);
    oracle.end_change(1, change, false, false);
    let (during, change) = write(&mut oracle, 1..2);
    let intent = Intent::Copy { source: 1, name: "s".into(), units: 8, snapshot: true };
    oracle.begin_control(2, intent);
    oracle.end_change(1, change, false, false);
    oracle.end_control(2, Ok(&[2]));
    let content = &oracle.volumes()[&2].live;
    assert_eq!(content.values(0), [Value::data(before, 0, 0)]);
    assert!(content.allows(1, Value::ZERO) && content.allows(1, Value::data(during, 0, 1)));
}

#[test]
fn data_cut_off_by_a_shrink_never_comes_back() {
    let mut oracle = oracle();
    let (number, change) = write(&mut oracle, 0..8);
    oracle.end_change(1, change, false, false);
    for (control, units) in [(5, 4), (6, 8)] {
        oracle.begin_control(control, Intent::Resize { volume: 1, units });
        oracle.end_control(control, Ok(&[]));
    }
    read(&mut oracle, 3, Value::data(number, 0, 3)).unwrap();
    assert!(read(&mut oracle, 4, Value::data(number, 0, 4)).is_err());
    read(&mut oracle, 4, Value::ZERO).unwrap();
}

#[test]
fn a_missing_and_an_unknown_volume_are_found() {
    let listed = Listed { id: 1, name: "a".into(), units: 8, snapshot: false, label: None };
    let mut fine = oracle();
    fine.opened(std::slice::from_ref(&listed)).unwrap();
    assert_eq!(fine.opened(&[]).unwrap_err().breach, Breach::Volumes);
    let unknown = Listed { id: 9, ..listed.clone() };
    assert!(fine.opened(&[listed, unknown]).is_err());
}
