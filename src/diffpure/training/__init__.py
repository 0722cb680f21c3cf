"""Training the models of the package: scores by denoising score matching, classifiers plainly or adversarially."""
