//! ValidateVolumeCapabilities.

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{
    ValidateVolumeCapabilitiesRequest, ValidateVolumeCapabilitiesResponse, VolumeCapability,
};
use tonic::Code;

use crate::csi::case::Need::Rows;
use crate::csi::case::{CREATE, MODES, cases};
use crate::csi::cx::{Answer, Cx, block, mounted_as, one, refused};

cases! { [CREATE]
    validate_without_id_is_invalid_argument;
    validate_without_capabilities_is_invalid_argument;
    validate_without_capabilities_comes_before_not_found;
    validate_of_an_unknown_volume_is_not_found;
    validate_confirms_what_the_volume_was_made_for;
    validate_confirms_the_newer_modes: MODES;
    validate_of_what_is_unsupported_is_ok_and_confirms_nothing;
    validate_looks_at_every_capability;
    validate_of_an_unknown_mode_is_invalid_argument: Rows;
    validate_without_a_mode_is_invalid_argument: Rows;
    validate_does_not_confirm_several_nodes: Rows;
    validate_of_unknown_parameters_confirms_nothing: Rows;
}

fn ask(
    cx: &Cx<'_>,
    id: &str,
    volume_capabilities: Vec<VolumeCapability>,
) -> Answer<ValidateVolumeCapabilitiesResponse> {
    cx.driver.validate_volume_capabilities(ValidateVolumeCapabilitiesRequest {
        volume_id: id.to_owned(),
        volume_capabilities,
        ..Default::default()
    })
}

fn validate_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let wanted = vec![cx.mount(Mode::SingleNodeWriter)];
    refused(ask(cx, "", wanted), Code::InvalidArgument).map(|_| ())
}

fn validate_without_capabilities_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    refused(ask(cx, &volume.volume_id, vec![]), Code::InvalidArgument).map(|_| ())
}

fn validate_without_capabilities_comes_before_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let id = cx.gone_volume()?;
    refused(ask(cx, &id, vec![]), Code::InvalidArgument).map(|_| ())
}

fn validate_of_an_unknown_volume_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    for id in [gone.as_str(), "nothing", "a/b", "../x", "🦀"] {
        let wanted = vec![cx.mount(Mode::SingleNodeWriter)];
        refused(ask(cx, id, wanted), Code::NotFound)?;
    }
    Ok(())
}

fn confirmed(cx: &mut Cx<'_>, wanted: Vec<VolumeCapability>) -> Result<()> {
    let mut request = cx.request();
    request.volume_capabilities = wanted.clone();
    let volume = cx.create(&request)?;
    let request = ValidateVolumeCapabilitiesRequest {
        volume_id: volume.volume_id.clone(),
        volume_context: volume.volume_context.clone(),
        volume_capabilities: wanted.clone(),
        parameters: cx.options.parameters.clone(),
        ..Default::default()
    };
    let answer = cx.driver.validate_volume_capabilities(request)?;
    let confirmed =
        answer.confirmed.with_context(|| format!("not confirmed: {}", answer.message))?;
    ensure!(confirmed.volume_capabilities == wanted, "{:?}", confirmed.volume_capabilities);
    Ok(())
}

fn validate_confirms_what_the_volume_was_made_for(cx: &mut Cx<'_>) -> Result<()> {
    let wanted = vec![cx.mount(Mode::SingleNodeWriter)];
    confirmed(cx, wanted)
}

/// Row: W6.
fn validate_confirms_the_newer_modes(cx: &mut Cx<'_>) -> Result<()> {
    for mode in [Mode::SingleNodeSingleWriter, Mode::SingleNodeMultiWriter] {
        let wanted = vec![cx.mount(mode)];
        confirmed(cx, wanted)?;
    }
    let wanted =
        vec![cx.mount(Mode::SingleNodeSingleWriter), cx.mount(Mode::SingleNodeMultiWriter)];
    confirmed(cx, wanted)
}

fn unconfirmed(cx: &mut Cx<'_>, wanted: Vec<VolumeCapability>) -> Result<()> {
    let volume = cx.volume()?;
    let answer = ask(cx, &volume.volume_id, wanted)?;
    ensure!(answer.confirmed.is_none(), "{answer:?}");
    ensure!(!answer.message.is_empty(), "without a message");
    Ok(())
}

/// Row: W9.
fn validate_of_what_is_unsupported_is_ok_and_confirms_nothing(cx: &mut Cx<'_>) -> Result<()> {
    unconfirmed(cx, vec![mounted_as("no-such-fs", Mode::SingleNodeWriter)])
}

/// Row: W9.
fn validate_looks_at_every_capability(cx: &mut Cx<'_>) -> Result<()> {
    let good = cx.mount(Mode::SingleNodeWriter);
    let bad = mounted_as("no-such-fs", Mode::SingleNodeWriter);
    unconfirmed(cx, vec![good.clone(), bad.clone()])?;
    unconfirmed(cx, vec![bad, good])
}

/// Row: W10.
fn validate_of_an_unknown_mode_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let wanted = vec![cx.mount(Mode::Unknown)];
    refused(ask(cx, &volume.volume_id, wanted), Code::InvalidArgument).map(|_| ())
}

/// Row: W11.
fn validate_without_a_mode_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let mut capability = cx.mount(Mode::SingleNodeWriter);
    capability.access_mode = None;
    refused(ask(cx, &volume.volume_id, vec![capability]), Code::InvalidArgument).map(|_| ())
}

/// Row: W31.
fn validate_does_not_confirm_several_nodes(cx: &mut Cx<'_>) -> Result<()> {
    let modes =
        [Mode::MultiNodeReaderOnly, Mode::MultiNodeSingleWriter, Mode::MultiNodeMultiWriter];
    for mode in modes {
        for capability in [cx.mount(mode), block(mode)] {
            unconfirmed(cx, vec![capability])?;
        }
    }
    Ok(())
}

fn validate_of_unknown_parameters_confirms_nothing(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let request = ValidateVolumeCapabilitiesRequest {
        volume_id: volume.volume_id,
        volume_capabilities: vec![cx.mount(Mode::SingleNodeWriter)],
        parameters: one("no-such-key", "1"),
        ..Default::default()
    };
    let answer = cx.driver.validate_volume_capabilities(request)?;
    ensure!(answer.confirmed.is_none() && !answer.message.is_empty(), "{answer:?}");
    Ok(())
}
