//! ControllerModifyVolume and mutable parameters.

use std::collections::HashMap;

use anyhow::{Result, ensure};
use blockd_csi::proto::{ControllerModifyVolumeRequest, CreateVolumeRequest};
use tonic::Code;

use crate::csi::case::Need::{Mutable, Rows};
use crate::csi::case::{CREATE, LIST, MODIFY, cases};
use crate::csi::cx::{Answer, Cx, one, refused, says};

cases! { [CREATE, MODIFY]
    modify_without_id_is_invalid_argument;
    modify_of_an_unknown_volume_is_not_found: Mutable;
    modify_of_an_unknown_parameter_is_invalid_argument;
    modify_is_repeated_without_harm: Mutable;
    a_volume_is_made_with_mutable_parameters: Mutable;
    a_modified_volume_is_otherwise_as_it_was: Mutable, LIST;
    every_mutable_parameter_is_taken: Rows;
    a_mutable_parameter_out_of_range_is_refused_by_name: Rows;
    a_good_and_a_bad_parameter_together_are_refused: Rows;
    a_class_may_say_what_can_be_changed_later: Rows;
}

fn modify(cx: &Cx<'_>, id: &str, parameters: HashMap<String, String>) -> Answer<()> {
    let request = ControllerModifyVolumeRequest {
        volume_id: id.to_owned(),
        mutable_parameters: parameters,
        ..Default::default()
    };
    cx.driver.controller_modify_volume(request).map(|_| ())
}

fn modify_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let parameters = cx.options.mutable_parameters.clone();
    refused(modify(cx, "", parameters), Code::InvalidArgument).map(|_| ())
}

fn modify_of_an_unknown_volume_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    for id in [gone.as_str(), "nothing", "a/b", "../x", "🦀"] {
        refused(modify(cx, id, cx.options.mutable_parameters.clone()), Code::NotFound)?;
    }
    Ok(())
}

fn modify_of_an_unknown_parameter_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let answer = modify(cx, &volume.volume_id, one("no-such-key", "1"));
    let status = refused(answer, Code::InvalidArgument)?;
    if cx.options.rows { says(&status, &["no-such-key"]) } else { Ok(()) }
}

fn modify_is_repeated_without_harm(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    for _ in 0..3 {
        modify(cx, &volume.volume_id, cx.options.mutable_parameters.clone())?;
    }
    Ok(())
}

fn a_volume_is_made_with_mutable_parameters(cx: &mut Cx<'_>) -> Result<()> {
    let mutable_parameters = cx.options.mutable_parameters.clone();
    let request = CreateVolumeRequest { mutable_parameters, ..cx.request() };
    let first = cx.create(&request)?;
    let again = cx.create(&request)?;
    ensure!(first == again, "{first:?} and {again:?}");
    Ok(())
}

fn a_modified_volume_is_otherwise_as_it_was(cx: &mut Cx<'_>) -> Result<()> {
    let request = cx.request();
    let volume = cx.create(&request)?;
    modify(cx, &volume.volume_id, cx.options.mutable_parameters.clone())?;
    let again = cx.create(&request)?;
    ensure!(volume == again, "{volume:?} and {again:?}");
    let listed = cx.driver.all_volumes(0)?;
    let listed = listed.iter().find(|one| one.volume_id == volume.volume_id);
    ensure!(listed.is_some_and(|one| one.capacity_bytes == volume.capacity_bytes), "{listed:?}");
    Ok(())
}

fn own(cx: &Cx<'_>, key: &str) -> String {
    format!("{}/{key}", cx.offers().name)
}

fn every_mutable_parameter_is_taken(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    for (key, value) in [
        ("iops", "1000"),
        ("iops", "0"),
        ("bandwidth", "100Mi"),
        ("bandwidth", "1048576"),
        ("on-full", "block"),
        ("on-full", "error"),
        ("reservation", "1Mi"),
        ("reservation", "0"),
        ("quota", "64Mi"),
        ("quota", "0"),
    ] {
        modify(cx, &volume.volume_id, one(&own(cx, key), value))?;
    }
    let both = HashMap::from([
        (own(cx, "on-full"), "timeout".to_owned()),
        (own(cx, "on-full-timeout"), "5s".to_owned()),
    ]);
    modify(cx, &volume.volume_id, both)?;
    Ok(())
}

fn a_mutable_parameter_out_of_range_is_refused_by_name(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    for (key, value) in [
        ("iops", "-1"),
        ("iops", "many"),
        ("iops", "18446744073709551616"),
        ("bandwidth", "-5"),
        ("bandwidth", "9Ei9"),
        ("bandwidth", "16Ei"),
        ("on-full", "explode"),
        ("reservation", "-1"),
        ("quota", "a lot"),
    ] {
        let key = own(cx, key);
        let answer = modify(cx, &volume.volume_id, one(&key, value));
        says(&refused(answer, Code::InvalidArgument)?, &[&key, value])?;
        let mutable_parameters = one(&key, value);
        let request = CreateVolumeRequest { mutable_parameters, ..cx.request() };
        says(&refused(cx.create(&request), Code::InvalidArgument)?, &[&key, value])?;
    }
    Ok(())
}

fn a_good_and_a_bad_parameter_together_are_refused(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let both = HashMap::from([
        (own(cx, "iops"), "1000".to_owned()),
        (own(cx, "no-such-key"), "1".to_owned()),
    ]);
    let status = refused(modify(cx, &volume.volume_id, both), Code::InvalidArgument)?;
    says(&status, &["no-such-key"])
}

fn a_class_may_say_what_can_be_changed_later(cx: &mut Cx<'_>) -> Result<()> {
    let key = own(cx, "iops");
    let request = cx.request_with(&key, "1000");
    cx.create(&request)?;
    let request = cx.request_with(&key, "many");
    says(&refused(cx.create(&request), Code::InvalidArgument)?, &[&key, "many"])
}
